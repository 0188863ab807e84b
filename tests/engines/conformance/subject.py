"""The engine under test: a running server of ours, and what a check asks of it."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engines.clients.external import connect
from engines.config import EngineConfig
from engines.engine import Engine
from engines.errors import EngineRefused
from engines.process.engine_server import EngineServer
from engines.types import EngineKind, PauseMode, ReplicaInfo
from tests.rigs.calls import chunks_of

Json = dict[str, Any]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = [5, 6, 7, 8, 9, 10, 11]
"""Ids of ordinary characters in every model that the suite is run on."""
PLAIN = {str(token_id): 100 for token_id in range(5, 15)}
"""As `logit_bias`: only those characters are written, whatever the weights. (The simulated engine's always are.)"""
REQUEST_S = 180.0
"""Bound of every call. A busy machine with two cores runs SGLang on CPU at a few tokens a second."""

_TRIES = 5
_salts = map(str, itertools.count())


class Running:
    """A long streamed request that is read in the background."""

    def __init__(self, chunks: AsyncGenerator[Json]) -> None:
        self.choices: list[Json] = []
        self._chunks = chunks
        self._speaks = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    @property
    def token_ids(self) -> list[int]:
        return [token_id for choice in self.choices for token_id in choice["token_ids"] or []]

    @property
    def finish_reason(self) -> str | None:
        return self.choices[-1]["finish_reason"] if self.choices else None

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def speaking(self) -> None:
        """Returns when the first tokens are here."""
        speaks = asyncio.create_task(self._speaks.wait())
        await asyncio.wait([self._task, speaks], timeout=REQUEST_S, return_when=asyncio.FIRST_COMPLETED)
        speaks.cancel()
        assert self._speaks.is_set(), f"no tokens: {self._task}"

    async def silent_for(self, seconds: float) -> None:
        """Returns when no token has come for so long."""
        before = -1
        while before != (before := len(self.token_ids)):
            await asyncio.sleep(seconds)

    async def finished(self) -> "Running":
        await asyncio.wait_for(asyncio.shield(self._task), REQUEST_S)
        return self

    async def close(self) -> None:
        """Go away, as a client that disconnects does."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _read(self) -> None:
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                self.choices += chunk["choices"]
                if self.token_ids:
                    self._speaks.set()


@dataclass
class Subject:
    """One engine server and a client of it. `info` changes when it is started anew."""

    config: EngineConfig
    server: EngineServer
    info: ReplicaInfo
    engine: Engine
    tokens_per_s: float = 0.0

    @classmethod
    async def start(cls, config: EngineConfig) -> "Subject":
        server = EngineServer(config, replica_id="engine-0", group="engine", index=0)
        info = await server.start()
        subject = cls(config, server, info, _client(info))
        await subject.measure()
        return subject

    async def start_again(self) -> None:
        await self.engine.close()
        self.info = await self.server.start()
        self.engine = _client(self.info)

    async def stop(self) -> None:
        await self.engine.close()
        await self.server.stop()

    @property
    def kind(self) -> EngineKind:
        return self.info.kind

    @property
    def longest(self) -> int:
        """Tokens that can follow `PROMPT`. SGLang keeps one or two places of the model's length for itself."""
        assert self.info.max_model_len is not None
        return self.info.max_model_len - len(PROMPT) - 2

    @property
    def long(self) -> int:
        """Tokens that take it long enough to be met while they are made, on a slow machine and on a fast one."""
        seconds = 0.6 if self.kind is EngineKind.SIM else 4.0
        return max(64, min(self.longest, int(self.tokens_per_s * seconds)))

    @property
    def still_s(self) -> float:
        """How long nothing must happen before it counts as not happening."""
        return 0.1 if self.kind is EngineKind.SIM else 0.5

    @property
    def tolerance(self) -> float:
        """How far two log-probabilities of one token may lie apart when they were computed in different batches.

        bfloat16 has 8 bits of precision: logits near 16, which trained models have, are 0.06 to 0.12 apart, and two
        kernels differ by a few such steps. On an H200 the most seen against transformers was 0.125.
        """
        if self.kind is EngineKind.SIM:
            return 1e-9
        return 0.002 if self.config.dtype == "float32" else 0.3

    def body(self, **fields: Any) -> Json:
        """Greedy, of full length, and with a salt of its own so that every answer is computed in the same way."""
        usual = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"model": self.info.model, "prompt": PROMPT, "cache_salt": next(_salts)} | usual | fields

    async def complete(self, **fields: Any) -> Json:
        return await self.engine.generate(COMPLETIONS, self.body(**fields), REQUEST_S)

    async def choice(self, **fields: Any) -> Json:
        """The one completion of one prompt."""
        (choice,) = (await self.complete(**fields))["choices"]
        return choice

    async def token_ids(self, **fields: Any) -> list[int]:
        return (await self.choice(**fields))["token_ids"]

    async def stream(self, **fields: Any) -> list[Json]:
        """All chunks."""
        chunks = chunks_of(self.engine, COMPLETIONS, self.body(**fields), REQUEST_S)
        return [chunk async for chunk in chunks]

    async def ask(self, path: str, body: Json | None = None) -> Json:
        return await self.engine.ask("GET" if body is None else "POST", path, body, REQUEST_S)

    async def refusal(self, **fields: Any) -> str:
        """The words with which it refuses this body; it goes on serving afterwards."""
        with pytest.raises(EngineRefused) as refused:
            await self.complete(**fields)
        assert 400 <= refused.value.status < 500
        await self.engine.health(REQUEST_S)
        assert len(await self.token_ids(max_tokens=2)) == 2
        return str(refused.value)

    async def logprobs_of(self, token_ids: list[int]) -> list[float]:
        """Teacher-forced log-probability of each token but the first."""
        choice = await self.choice(prompt=token_ids, prompt_logprobs=0, max_tokens=1)
        scored = zip(token_ids[1:], choice["prompt_logprobs"][1:], strict=True)
        return [entry[str(token_id)]["logprob"] for token_id, entry in scored]

    async def cached_tokens(self, **fields: Any) -> int:
        """Prompt tokens of a request that the prefix cache spared."""
        usage = (await self.complete(max_tokens=1, **fields))["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    @asynccontextmanager
    async def running(self, **fields: Any) -> AsyncIterator[Running]:
        """A long request that is under way."""
        body = self.body(**{"max_tokens": self.long, **fields})
        request = Running(chunks_of(self.engine, COMPLETIONS, body, REQUEST_S))
        try:
            await request.speaking()
            yield request
        finally:
            await request.close()

    @asynccontextmanager
    async def paused(self, mode: PauseMode, *, clear_cache: bool = False) -> AsyncIterator[None]:
        await self.engine.pause(mode, clear_cache=clear_cache, timeout_s=REQUEST_S)
        try:
            yield
        finally:
            await self.engine.resume(REQUEST_S)

    async def met_by_a_pause(self, mode: PauseMode, *, clear_cache: bool, **fields: Any) -> Running:
        """A request whose tokens a pause has stopped, after its end. On a busy machine one may be over before it."""
        for _ in range(_TRIES):
            async with self.running(**fields) as request:
                async with self.paused(mode, clear_cache=clear_cache):
                    # What was made before the pause was answered may still be on its way here.
                    await request.silent_for(self.still_s)
                    tokens = len(request.token_ids)
                if tokens < fields.get("max_tokens", self.long):
                    return await request.finished()
        raise AssertionError("each went on under its pause, or was over before")

    async def is_idle_within(self, seconds: float) -> bool:
        """Return True if the engine releases all requests in time: it resets a prefix cache only if no part is held."""
        deadline = time.monotonic() + seconds
        while not (idle := await self.engine.reset_prefix_cache(REQUEST_S)) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return idle

    @property
    def model_folder(self) -> Path | None:
        """None where no model is loaded."""
        return None if self.kind is EngineKind.SIM else Path(self.config.model)

    @property
    def end_token_id(self) -> int:
        """The token that ends a completion, as the model's folder has it."""
        assert self.model_folder is not None
        end = json.loads((self.model_folder / "config.json").read_text())["eos_token_id"]
        return int(end[0] if isinstance(end, list) else end)

    async def measure(self) -> None:
        """Note how fast it is at best: a machine that was busy at the start may be free later."""
        await self.token_ids(max_tokens=16)
        began = time.monotonic()
        await self.token_ids(max_tokens=32)
        self.tokens_per_s = max(self.tokens_per_s, 32 / (time.monotonic() - began))


def _client(info: ReplicaInfo) -> Engine:
    return connect(replace(info, has_tee=False))
