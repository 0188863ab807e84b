"""The witness of the chaos campaign: clients that never stop and check every token.

The simulated engine's tokens are a pure function of prompt, seed and weights: each completion is recomputed from its
reported weight versions.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import aiohttp

from engines.config import SimConfig
from loadtests.chaos.contents import Asked, Delivered, Flaw, flaw
from sim.model import SimModel

Json = dict[str, Any]

_PROMPTS, _SAMPLES, _TOKENS = 4, 2, 40
_RETRY_S = 0.1
_REASONS_KEPT = 5


@dataclass(slots=True)
class Tally:
    """Counts of submitted rollouts by result. `failed` ones got an error; `stale` ones have tokens of older weights
    than the fleet's at the request; `wrong` ones have other content than the weights that they name make of their
    prompt. `retried` counts requests that a plain client sent again."""

    submitted: int = 0
    delivered: int = 0
    failed: int = 0
    lost: int = 0
    duplicated: int = 0
    stale: int = 0
    wrong: int = 0
    hung: int = 0
    retried: int = 0
    reasons: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.duplicated or self.stale or self.wrong or self.hung)

    def note(self, reason: str) -> None:
        if len(self.reasons) < _REASONS_KEPT:
            self.reasons.append(reason)

    def add(self, other: "Tally") -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


class Witness:
    """Clients that send batch after batch to `url`. `version` is the trainer's newest committed version."""

    def __init__(self, url: str, sim: SimConfig, *, num_clients: int, bound_s: float) -> None:
        self.version = 0
        self.longest_silence_s = 0.0
        self._last_delivery = time.monotonic()
        self._url = url
        self._model = SimModel.of(sim)
        self._num_clients = num_clients
        self._bound_s = bound_s
        self._seeds: Iterator[int] = itertools.count(1)
        self._tally = Tally()
        self._stopping = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tally, self._stopping = Tally(), asyncio.Event()
        self._clients = [asyncio.create_task(self._run()) for _ in range(self._num_clients)]

    def hurt_now(self) -> None:
        """Start to measure the longest time without a delivery."""
        self._last_delivery, self.longest_silence_s = time.monotonic(), 0.0

    async def stop(self) -> Tally:
        """Wait for every client's last answer; rollouts without one are lost."""
        self._stopping.set()
        _, waiting = await asyncio.wait(self._clients, timeout=2 * self._bound_s)
        for client in waiting:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        tally = self._tally
        tally.lost = tally.submitted - tally.delivered - tally.failed
        return tally

    async def _run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._bound_s)) as session:
            while not self._stopping.is_set():
                await self._ask(session, next(self._seeds))

    async def _ask(self, session: aiohttp.ClientSession, seed: int) -> None:
        """Send one batch; retry while the connection fails, since a dead gateway has reported nothing."""
        body, floor, deadline = self._body(seed), self.version, time.monotonic() + self._bound_s
        tally = self._tally
        tally.submitted += _PROMPTS * _SAMPLES
        while True:
            try:
                async with session.post(self._url + "/v1/completions", json=body) as response:
                    answer = await response.json()
            except TimeoutError:
                tally.hung += 1
                tally.note(f"batch {seed}: no answer within {self._bound_s:g} s")
                return
            except aiohttp.ClientError as error:
                if time.monotonic() > deadline:
                    tally.failed += _PROMPTS * _SAMPLES
                    tally.note(f"batch {seed}: {error!r}")
                    return
                await asyncio.sleep(_RETRY_S)
                continue
            if response.status != 200:
                tally.failed += _PROMPTS * _SAMPLES
                tally.note(f"batch {seed}: {response.status} {answer['error']['message'][:300]}")
            else:
                self._check(seed, floor, answer["choices"])
                now = time.monotonic()
                self.longest_silence_s = max(self.longest_silence_s, now - self._last_delivery)
                self._last_delivery = now
            return

    def _check(self, seed: int, floor: int, choices: list[Json]) -> None:
        places = [choice["index"] for choice in choices]
        self._tally.duplicated += len(places) - len(set(places))
        self._tally.delivered += len(set(places) & set(range(_PROMPTS * _SAMPLES)))
        for choice in choices:
            if (found := self._flaw(seed, floor, choice)) is not None:
                self._tally.stale += found.is_stale
                self._tally.wrong += not found.is_stale
                self._tally.note(f"batch {seed}, choice {choice['index']}: {found.reason}")

    def _body(self, seed: int) -> Json:
        """Return the request of a batch: 8 samples."""
        return {
            "prompt": _prompts(seed),
            "n": _SAMPLES,
            "seed": seed,
            "max_tokens": _TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 0,
        }

    def _flaw(self, seed: int, floor: int, choice: Json) -> Flaw | None:
        prompt, sample = _prompts(seed)[choice["index"] // _SAMPLES], choice["index"] % _SAMPLES
        asked = Asked(prompt, _TOKENS, floor, is_greedy=False, seed=seed, sample=sample)
        return flaw(self._model, asked, Delivered.of_choice(choice))


def _prompts(seed: int) -> list[list[int]]:
    return [[3 + seed % 900, 3 + seed // 900 % 900, 3 + place] for place in range(_PROMPTS)]
