"""Measures an engine: starts it, sends batches as the gateway would, and reports tokens/s."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from engines.chunks import Chunk
from engines.clients.external import connect
from engines.config import EngineConfig
from engines.engine import Engine, Json
from engines.errors import ConfigError, DeadlineExceeded, EngineFailed
from engines.process.engine_server import EngineServer
from engines.process.launch import gpus_per_replica
from engines.reading.server import read
from engines.types import ReplicaInfo
from tuning.tune.batch import Ask, Batch

_PATH = "/v1/completions"
_GROUP = "tune"
# A batch ends at the deadline of the run; a request's own deadline is later by this.
_MARGIN_S = 60.0


class Running(Protocol):
    """An engine that serves, and is warm."""

    async def run(self, number: int, timeout_s: float) -> float:
        """Run the batch of this number. Return the seconds from the first prompt to the last token."""


class Bench(Protocol):
    """Where engines are measured."""

    tokens: int
    """Of one batch."""

    def serving(self, engine: EngineConfig, start_s: float) -> AbstractAsyncContextManager[Running]:
        """Yield an engine, whose start may take `start_s`. Errors are those of its start."""


class EngineBench:
    """Measures engines on this host, one at a time."""

    def __init__(self, batch: Batch, gpus: Sequence[str]) -> None:
        self.tokens = batch.tokens
        self._batch = batch
        self._gpus = gpus
        self._names = itertools.count()

    @asynccontextmanager
    async def serving(self, engine: EngineConfig, start_s: float) -> AsyncIterator[Running]:
        gpus = self._gpus[: gpus_per_replica(engine)]
        name = f"{_GROUP}-{next(self._names)}"
        server = EngineServer(_bounded(engine, gpus, start_s), replica_id=name, group=_GROUP, index=0)
        try:
            info = await server.start()
            client = connect(info)
            try:
                running = _Served(client, info, self._batch)
                await running.warm_up(start_s)
                yield running
            finally:
                await client.close()
        finally:
            await server.stop()


class _Served:
    def __init__(self, client: Engine, info: ReplicaInfo, batch: Batch) -> None:
        if info.max_model_len is not None and batch.longest > info.max_model_len:
            raise ConfigError(
                f"the workload has sequences of {batch.longest} tokens, and the engine's max_model_len is "
                f"{info.max_model_len}: raise engine.max_model_len, or lower --prompt and --response"
            )
        self._engine = client
        self._info = info
        self._batch = batch

    async def warm_up(self, timeout_s: float) -> None:
        """Have the engine do its first work: compile, allocate, fill its caches."""
        await self._send(self._batch.opening(), "warm-up", timeout_s)

    async def run(self, number: int, timeout_s: float) -> float:
        began = time.monotonic()
        await self._send(self._batch, f"run {number}", timeout_s)
        return time.monotonic() - began

    async def _send(self, batch: Batch, seed: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for index, ask in enumerate(batch.asks):
                    group.create_task(self._ask(ask, f"{seed} {index}", timeout_s + _MARGIN_S))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except TimeoutError:
            raise DeadlineExceeded(f"cut off: a batch was not done within {timeout_s:.1f} s") from None

    async def _ask(self, ask: Ask, seed: str, timeout_s: float) -> None:
        body = {"model": self._info.model, **ask.body(seed)}
        chunks: list[Chunk] = []
        await read(self._engine, _PATH, body, timeout_s, chunks.extend, is_whole=not self._info.streams)
        tokens = sum(map(_tokens, chunks))
        if tokens != ask.samples * ask.max_tokens:
            message = f"{tokens} tokens came of {ask.samples * ask.max_tokens} that were asked for"
            raise EngineFailed(message, replica_id=self._info.replica_id)


def _tokens(chunk: Chunk) -> int:
    return sum(choice.num_tokens for choice in chunk.choices)


def _bounded(engine: EngineConfig, gpus: Sequence[str], start_s: float) -> EngineConfig:
    """Return the configuration of one replica on these GPUs, whose start has to end in the time left."""
    change: Json = {"start_timeout_s": min(engine.start_timeout_s, max(1.0, start_s)), "num_replicas": 1}
    if gpus:
        change["env"] = {**engine.env, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return engine.model_copy(update=change)
