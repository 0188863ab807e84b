"""Gateways killed under rollouts: does a rollout get lost or delivered twice, and how many tokens are made again?

    python -m loadtests.chaos.replays [--rollouts 20000] [--replicas 4] [--tokens 512] [--clients 32] [--kill-every 30]
                                      [--json out.json]

Clients send whole batches to /v1/completions. Where the connection broke, they send the same bytes again, as TRL's
client does. The gateway's process is killed with SIGKILL at random moments, after `--kill-every` seconds of service on
average, and started again on its port. Engines are simulated (`process_fleet.py`). Few bodies are sent, each many
times and unseeded, so that a reply that reaches two clients shows in its tokens. The exit status is 1 if a rollout was
lost, failed, delivered twice or is wrong.
"""

import argparse
import asyncio
import dataclasses
import hashlib
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson

from engines.config import SimConfig
from loadtests.chaos.clients.callers import choices_of
from loadtests.chaos.clients.contents import Asked, Delivered, flaw
from loadtests.chaos.clients.tally import Tally
from loadtests.chaos.process_fleet import ProcessFleet, fleet_config, healthy_within, running
from sim.model import SimModel

Json = dict[str, Any]
T = TypeVar("T")

_SIM = SimConfig(load_s=0.1, decode_step_s=0.01, decode_step_per_seq_s=0.0)
_PROMPTS, _SAMPLES = 4, 4
_BODIES = 16
_UP_S = 120.0
_BOUND_S = 600.0
_RETRY_S = 0.2
_LEAST_LIFE_S = 5.0


@dataclass(slots=True)
class Campaign:
    """The result. `again` are the tokens that were made and not delivered, as a share of the delivered ones."""

    tally: Tally
    kills: int = 0
    seconds: float = 0.0
    delivered_tokens: int = 0
    made_tokens: float = 0.0
    replays: int = 0

    @property
    def again(self) -> float:
        return self.made_tokens / max(1, self.delivered_tokens) - 1


class Clients:
    """Clients, which send until `rollouts` were submitted."""

    def __init__(self, url: str, rollouts: int, tokens: int) -> None:
        self.url = url
        self.result = Campaign(Tally())
        self._left = rollouts
        self._tokens = tokens
        self._model = SimModel.of(_SIM)
        self._seen: set[bytes] = set()
        self._number = 0
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_BOUND_S), connector=aiohttp.TCPConnector(limit=0)
        )

    async def run(self, clients: int) -> None:
        """Return when all rollouts have ended."""
        await asyncio.gather(*(self._repeat() for _ in range(clients)))
        tally = self.result.tally
        tally.lost = tally.submitted - tally.delivered - tally.failed

    async def close(self) -> None:
        await self._session.close()

    async def _repeat(self) -> None:
        while self._left > 0:
            self._left -= _PROMPTS * _SAMPLES
            self._number += 1
            self.result.tally.submitted += _PROMPTS * _SAMPLES
            await self._ask([[3 + self._number % _BODIES, 3 + place] for place in range(_PROMPTS)])

    async def _ask(self, prompts: list[list[int]]) -> None:
        """Send a batch until it is answered, the same bytes each time."""
        asked = {"prompt": prompts, "n": _SAMPLES, "max_tokens": self._tokens, "ignore_eos": True, "logprobs": 0}
        content = orjson.dumps(asked | {"return_token_ids": True})
        choices = await self._until_answered(lambda: choices_of(self._session, f"{self.url}/v1/completions", content))
        if choices is None:
            return
        self.result.tally.duplicated += len(choices) - len({choice["index"] for choice in choices})
        for choice in choices:
            self._take(prompts[choice["index"] // _SAMPLES], Delivered.of_choice(choice))

    async def _until_answered(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """Ask again where the connection broke. Return None where it has failed."""
        deadline = time.monotonic() + _BOUND_S
        while time.monotonic() < deadline:
            try:
                return await ask()
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                self.result.replays += 1
                await asyncio.sleep(_RETRY_S)
            except aiohttp.ClientResponseError as error:
                self._fail(f"{error.status} {error.message}")
                return None
        self._fail(f"no answer within {_BOUND_S:g} s")
        return None

    def _take(self, prompt: Sequence[int], got: Delivered) -> None:
        """Count and check a delivered sample."""
        tally = self.result.tally
        tally.delivered += 1
        self.result.delivered_tokens += len(got.token_ids)
        name = hashlib.blake2b(repr((prompt, got.token_ids)).encode(), digest_size=16).digest()
        tally.duplicated += name in self._seen
        self._seen.add(name)
        if found := flaw(self._model, Asked(prompt, self._tokens, 0, is_greedy=False), got):
            tally.wrong += 1
            tally.note(f"prompt {prompt}: {found.reason}")

    def _fail(self, reason: str) -> None:
        self.result.tally.failed += _PROMPTS * _SAMPLES
        self.result.tally.note(reason)


async def campaign(rollouts: int, replicas: int, tokens: int, clients: int, kill_every_s: float) -> Campaign:
    """Run the whole campaign."""
    with tempfile.TemporaryDirectory(prefix="replays-") as folder:
        config = fleet_config("replays", replicas, _SIM, Path(folder))
        fleet = ProcessFleet(config, Path(folder))
        async with running(fleet):
            senders = Clients(fleet.url, rollouts, tokens)
            try:
                await healthy_within(fleet.url, _UP_S)
                await _hurt(fleet, senders, clients, kill_every_s)
            finally:
                await senders.close()
            return senders.result


async def _hurt(fleet: ProcessFleet, senders: Clients, clients: int, kill_every_s: float) -> None:
    result, made_before, began = senders.result, await fleet.made(), time.monotonic()
    killing = asyncio.create_task(_kills(fleet, result, kill_every_s))
    try:
        await senders.run(clients)
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
    result.seconds = time.monotonic() - began
    result.made_tokens = await fleet.made() - made_before


async def _kills(fleet: ProcessFleet, result: Campaign, every_s: float) -> None:
    draw = random.Random(1)
    while True:
        await healthy_within(fleet.url, _UP_S)
        await asyncio.sleep(max(_LEAST_LIFE_S, draw.uniform(0.5, 1.5) * every_s))
        fleet.kill_gateway()
        result.kills += 1
        tally = result.tally
        print(
            f"kill {result.kills}: {tally.delivered} of {tally.submitted} delivered, {tally.duplicated} twice, "
            f"{tally.wrong} wrong, {result.replays} replays",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.chaos.replays", description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each rollout")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kill-every", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    args = parser.parse_args(argv)
    result = asyncio.run(campaign(args.rollouts, args.replicas, args.tokens, args.clients, args.kill_every))
    tally = result.tally
    for reason in tally.reasons:
        print(reason)
    print(
        f"{tally.submitted} rollouts in {result.seconds:.0f} s, {tally.delivered} delivered, {tally.failed} failed, "
        f"{result.kills} kills, {result.replays} replays, tokens made again {result.again:.2%}"
    )
    print(f"lost {tally.lost}, duplicated {tally.duplicated}, wrong {tally.wrong}")
    if args.json:
        args.json.write_bytes(orjson.dumps(dataclasses.asdict(result), option=orjson.OPT_INDENT_2))
    return 0 if tally.is_clean and not tally.failed else 1


if __name__ == "__main__":
    sys.exit(main())
