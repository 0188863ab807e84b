"""Plays a drawn workload against a gateway over HTTP."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import aiohttp
import orjson

from loadtests.workloads import Json, completion_request, random_tokens
from tuning.simulate.workloads.workload import Ask, Chain, Stream

_FAILURES = (aiohttp.ClientError, TimeoutError, ValueError, KeyError)


@dataclass
class Player:
    """Plays streams. An ask that fails ends its chain, and `errors` has the cause.

    Prompts differ from those of another `salt`, so that no prefix cache has them. With `hints` each request says how
    long its samples will be. `said` has the tokens of each session so far, `latencies` the seconds of each request.
    """

    url: str
    http: aiohttp.ClientSession
    salt: str = ""
    hints: bool = False
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    said: dict[str, list[int]] = field(default_factory=dict)

    async def play(self, stream: Stream, timeout_s: float) -> None:
        """Play a stream. What has not ended after `timeout_s` is given up, as an error."""
        try:
            async with asyncio.timeout(timeout_s):
                for phase in stream:
                    async with asyncio.TaskGroup() as tasks:
                        for chain in phase:
                            tasks.create_task(self._follow(chain))
        except TimeoutError:
            self.errors.append(f"the workload was not over after {timeout_s:g} s")

    async def _follow(self, chain: Chain) -> None:
        for ask in chain:
            await asyncio.sleep(ask.after_s)
            began = time.monotonic()
            try:
                await self._send(ask)
                self.latencies.append(time.monotonic() - began)
                if ask.is_last:
                    await self._post(f"/v1/sessions/{ask.session}/finish")
            except _FAILURES as error:
                self.errors.append(f"{ask.request}: {type(error).__name__}: {error}")
                return

    async def _send(self, ask: Ask) -> None:
        said = self.said.pop(ask.session, [])
        prompt = said + random_tokens(Random(f"{self.salt} {ask.prefix} {len(said)}"), ask.prompt - len(said))
        body = completion_request(prompt, {"n": len(ask.lengths), "max_tokens": ask.limit, "ignore_eos": True})
        if self.hints:
            body["expected_tokens"] = max(ask.lengths)
        answer = await self._post("/v1/completions", body, session=ask.session)
        samples = [choice["token_ids"] for choice in answer["choices"]]
        if [len(sample) for sample in samples] != list(ask.lengths):
            raise ValueError(f"samples of {[len(sample) for sample in samples]} tokens, not of {list(ask.lengths)}")
        self.tokens += sum(ask.lengths)
        if ask.session and not ask.is_last:
            self.said[ask.session] = prompt + samples[0]

    async def _post(self, path: str, body: Json | None = None, session: str = "") -> Json:
        headers = {"Content-Type": "application/json", **({"X-Session-ID": session} if session else {})}
        async with self.http.post(f"{self.url}{path}", data=orjson.dumps(body or {}), headers=headers) as answer:
            content = await answer.read()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {content[:300]!r}")
        parsed: Json = orjson.loads(content)
        return parsed


def with_equal_samples(stream: Stream) -> Stream:
    """Return the stream with samples that end at their request's limit, since a request has one limit for all."""
    return [[[_equal(ask) for ask in chain] for chain in phase] for phase in stream]


def _equal(ask: Ask) -> Ask:
    return replace(ask, lengths=ask.lengths[:1] * len(ask.lengths), limit=ask.lengths[0])


def p99(latencies: Sequence[float]) -> float:
    return sorted(latencies)[int(0.99 * (len(latencies) - 1))] if latencies else 0.0
