"""Clients of a chaos run: `RolloutClient` as a trainer uses it, and plain HTTP clients, each checking every token.

A plain client sends a request again where a connection or stream broke off, or the answer is one that OpenAI's client
retries: 408, 409, 429 or 5xx.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import aiohttp
import orjson

from engines.config import SimConfig
from engines.errors import DeadlineExceeded
from loadtests.chaos.clients.contents import Asked, Delivered, flaw
from loadtests.chaos.clients.tally import Tally
from loadtests.chaos.faults import Newest
from sim.dialect import chat_ids
from sim.model import SimModel
from trainer_client.client import RolloutClient
from trainer_client.sampling import SamplingParams

Json = dict[str, Any]

_RETRY_S = 0.2
_RETRIED = (408, 409, 429)
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_PROMPTS, _PLAIN_PROMPTS, _SAMPLES = 8, 4, 2


class BrokenOff(Exception):
    """A stream that ended with an error, or without its last line."""


@dataclass(slots=True)
class Record:
    """The tally of a run, its deliveries (time and tokens of each), and the errors after which requests were sent
    again."""

    tally: Tally = field(default_factory=Tally)
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)

    def tokens(self, begin: float, end: float) -> int:
        """Return the tokens delivered between two times."""
        return sum(tokens for at, tokens in self.deliveries if begin <= at < end)

    @property
    def longest_silence_s(self) -> float:
        times = sorted(at for at, _ in self.deliveries)
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


class Callers:
    """All clients of one fleet. `tokens` is the length of each completion; `key` is sent as bearer."""

    def __init__(self, url: str, sim: SimConfig, newest: Newest, *, tokens: int, bound_s: float, key: str = "") -> None:
        self.url = url
        self.tokens = tokens
        self.record = Record()
        self._model = SimModel.of(sim)
        self._newest = newest
        self._bound_s = bound_s
        self._numbers: Iterator[int] = itertools.count(1)
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._key = key

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self._bound_s)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), headers=headers)

    @cached_property
    def _client(self) -> RolloutClient:
        return RolloutClient(self.url, api_key=self._key)

    @property
    def kinds(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return the ways in which clients ask, each for a few rollouts at once."""
        return {
            "RolloutClient": self.trainer,
            "RolloutClient, n > 1": self.groups,
            "completions": self.completions,
            "completions streamed": self.streamed,
            "chat": self.chat,
            "chat streamed": self.chat_streamed,
        }

    async def close(self) -> None:
        """Close what is open; the next request opens it again."""
        for opened in ("_client", "_session"):
            if (one := vars(self).pop(opened, None)) is not None:
                await one.close()

    def start(self, each: int) -> None:
        """Let `each` clients of each kind send without pause, from a new record on."""
        self.record, self._stopping = Record(), asyncio.Event()
        self._tasks = [asyncio.create_task(self._repeat(ask)) for ask in self.kinds.values() for _ in range(each)]

    async def stop(self) -> Record:
        """Wait for every client's last answer; rollouts without one are lost."""
        self._stopping.set()
        _, waiting = await asyncio.wait(self._tasks, timeout=2 * self._bound_s)
        for task in waiting:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        return self.settled()

    def settled(self) -> Record:
        """Return the record with what is lost: submitted, and neither delivered nor reported failed."""
        tally = self.record.tally
        tally.lost = tally.submitted - tally.delivered - tally.failed
        return self.record

    async def _repeat(self, ask: Callable[[], Awaitable[None]]) -> None:
        while not self._stopping.is_set():
            await ask()

    async def trainer(self) -> None:
        """A batch of greedy prompts."""
        number = next(self._numbers)
        sampling = SamplingParams(max_tokens=self.tokens, temperature=0.0, ignore_eos=True)
        await self._batch(_prompts(number, _PROMPTS), sampling)

    async def batch(self, lengths: Sequence[int]) -> None:
        """A trainer's batch: a few greedy prompts of each length, at once."""
        sampling = [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in lengths]
        await asyncio.gather(*(self._batch(_prompts(next(self._numbers), _PROMPTS), one) for one in sampling))

    async def groups(self) -> None:
        """Groups of samples with unknown draws."""
        number = next(self._numbers)
        await self._batch(_prompts(number, 2), SamplingParams(max_tokens=self.tokens, n=4, ignore_eos=True))

    async def completions(self) -> None:
        """One request for several prompts, seeded."""
        asked, body = self._numbered(next(self._numbers))
        await self._plain(asked, _COMPLETIONS, body)

    def _numbered(self, number: int) -> tuple[list[Asked], Json]:
        """Return the samples of the request of this number, and its body."""
        floor, prompts = self._newest.version, _prompts(number, _PLAIN_PROMPTS)
        asked = [
            Asked(prompt, self.tokens, floor, is_greedy=False, seed=number, sample=sample)
            for prompt in prompts
            for sample in range(_SAMPLES)
        ]
        return asked, self._body(prompt=prompts, n=_SAMPLES, seed=number, logprobs=0)

    async def streamed(self) -> None:
        """One stream with two samples of an unknown draw for each prompt."""
        floor, prompts = self._newest.version, _prompts(next(self._numbers), 2)
        asked = [Asked(prompt, self.tokens, floor, is_greedy=False) for prompt in prompts for _ in range(_SAMPLES)]
        body = self._body(prompt=prompts, n=_SAMPLES, logprobs=0, stream=True)
        await self._plain(asked, _COMPLETIONS, body)

    async def chat(self) -> None:
        messages, asked = self._conversation()
        body = self._body(messages=messages, temperature=0.0)
        await self._plain([asked], _CHAT, body)

    async def chat_streamed(self) -> None:
        messages, asked = self._conversation()
        body = self._body(messages=messages, temperature=0.0, stream=True)
        await self._plain([asked], _CHAT, body)

    def _conversation(self) -> tuple[list[Json], Asked]:
        messages = [{"role": "user", "content": f"rollout {next(self._numbers)}"}]
        prompt = chat_ids(messages)
        return messages, Asked(prompt, self.tokens, self._newest.version, is_greedy=True)

    def _body(self, **rest: Any) -> Json:
        return {"max_tokens": self.tokens, "ignore_eos": True, "return_token_ids": True, **rest}

    async def _batch(self, prompts: list[list[int]], sampling: SamplingParams) -> None:
        """Let `RolloutClient` run a batch, and check each rollout as it ends."""
        floor, tally, seen = self._newest.version, self.record.tally, set[int]()
        tally.submitted += len(prompts) * sampling.n
        batch = self._client.generate(prompts, sampling, failures="keep", timeout_s=self._bound_s)
        async with aclosing(batch.rollouts()) as rollouts:
            async for rollout in rollouts:
                if rollout.error is not None:
                    tally.hung += sampling.n * isinstance(rollout.error, DeadlineExceeded)
                    self._fail(sampling.n, f"RolloutClient: {rollout.error}")
                    continue
                tally.duplicated += sampling.n * (rollout.prompt_index in seen)
                seen.add(rollout.prompt_index)
                prompt, is_greedy = prompts[rollout.prompt_index], sampling.temperature == 0
                asked = Asked(prompt, sampling.max_tokens, floor, is_greedy=is_greedy)
                assert [one.sample_index for one in rollout.completions] == list(range(sampling.n))
                self._take([(asked, Delivered.of_completion(one)) for one in rollout.completions])

    async def _plain(self, asked: Sequence[Asked], path: str, body: Json) -> None:
        """Send a request until it is answered, and check its choices."""
        tally, deadline = self.record.tally, time.monotonic() + self._bound_s
        tally.submitted += len(asked)
        ask = streamed_choices_of if body.get("stream") else choices_of
        while True:
            try:
                choices = await ask(self._session, self.url + path, orjson.dumps(body))
                break
            except TimeoutError:
                tally.hung += 1
                self._fail(len(asked), f"no answer within {self._bound_s:g} s")
                return
            except (aiohttp.ClientError, ConnectionError, BrokenOff) as error:
                tally.retried += 1
                self.record.retries[_named(error)] += 1
                status = error.status if isinstance(error, aiohttp.ClientResponseError) else 0
                if not self._may_retry(status) or time.monotonic() > deadline:
                    self._fail(len(asked), _named(error))
                    return
            await asyncio.sleep(_RETRY_S)
        self._answered(asked, choices)

    def _may_retry(self, status: int) -> bool:
        """Return True if a request is sent again after an answer of this status; 0 where none came."""
        return status in _RETRIED or status >= 500 or status == 0

    def _answered(self, asked: Sequence[Asked], choices: Sequence[Json]) -> None:
        tally, places = self.record.tally, [choice["index"] for choice in choices]
        tally.duplicated += len(places) - len(set(places))
        first = {choice["index"]: choice for choice in reversed(choices)}
        self._take([(one, Delivered.of_choice(first[place])) for place, one in enumerate(asked) if place in first])

    def _take(self, samples: Sequence[tuple[Asked, Delivered]]) -> None:
        """Count and check delivered samples."""
        tally = self.record.tally
        for asked, got in samples:
            tally.delivered += 1
            self.record.deliveries.append((time.monotonic(), len(got.token_ids)))
            if found := flaw(self._model, asked, got):
                tally.stale += found.is_stale
                tally.wrong += not found.is_stale
                tally.note(f"prompt {list(asked.prompt[:8])}: {found.reason}")

    def _fail(self, samples: int, reason: str) -> None:
        self.record.tally.failed += samples
        self.record.tally.note(reason)


def _prompts(number: int, count: int) -> list[list[int]]:
    return [[3 + number % 900, 3 + number // 900 % 900, 3 + place] for place in range(count)]


def _join(whole: Json, choice: Json) -> None:
    text = choice.get("text") if "delta" not in choice else choice["delta"].get("content")
    whole["text"] = whole.get("text", "") + (text or "")
    whole["token_ids"] = whole.get("token_ids", []) + (choice.get("token_ids") or [])
    if scores := choice.get("logprobs"):
        before = whole.get("logprobs", {"token_logprobs": []})["token_logprobs"]
        whole["logprobs"] = {"token_logprobs": before + scores["token_logprobs"]}
    if choice.get("weight_versions"):
        whole["weight_versions"] = choice["weight_versions"]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            return
        chunk = orjson.loads(line[6:])
        if "error" in chunk:
            raise BrokenOff(str(chunk["error"])[:300])
        yield chunk
    raise BrokenOff("the stream ended without [DONE]")


async def choices_of(session: aiohttp.ClientSession, url: str, content: bytes) -> list[Json]:
    """Return the choices of a whole reply. Raise `aiohttp.ClientError`, for another status than 200 with its words."""
    async with session.post(url, data=content, headers={"Content-Type": "application/json"}) as response:
        await _check(response)
        return list(orjson.loads(await response.read())["choices"])


async def streamed_choices_of(session: aiohttp.ClientSession, url: str, content: bytes) -> list[Json]:
    """Return the choices of a stream, joined. Raise also `BrokenOff`."""
    joined: dict[int, Json] = {}
    async with session.post(url, data=content, headers={"Content-Type": "application/json"}) as response:
        await _check(response)
        async for chunk in _events(response):
            for choice in chunk["choices"]:
                if choice["finish_reason"] == "abort" and "delta" in choice:
                    raise BrokenOff("an update has cut off a streamed conversation")
                _join(joined.setdefault(choice["index"], {"index": choice["index"]}), choice)
    return list(joined.values())


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        shown = (await response.read())[:300].decode(errors="replace")
        raise aiohttp.ClientResponseError(
            response.request_info, response.history, status=response.status, message=shown
        )


def _named(error: Exception) -> str:
    """Return an error in few words, to count it by."""
    return f"{error.status} {error.message}" if isinstance(error, aiohttp.ClientResponseError) else repr(error)
