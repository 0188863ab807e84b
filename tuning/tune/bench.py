"""Measures an engine: starts it, sends batches as the gateway would, and reports tokens/s."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from engines.clients.connect import connect
from engines.config import EngineConfig
from engines.engine import Engine, Json
from engines.errors import ConfigError, DeadlineExceeded, EngineError, EngineFailed
from engines.process.engine_server import EngineServer
from engines.process.launch import gpus_per_replica
from engines.types import ReplicaInfo
from tuning.tune.batch import Ask, Batch

_PATH = "/v1/completions"
_GROUP = "tune"
# A batch ends at the deadline of the run; a request's own deadline is later by this.
_MARGIN_S = 60.0
# Runs for each start of engines that take turns.
RUNS_A_START = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Runs of one engine: for each run tokens/s of each GPU, or of an engine without GPUs.

    `failure` is the reason for no speed: the engine did not start, failed under the load, or was cut off as too slow.
    """

    speeds: tuple[float, ...] = ()
    start_s: float = 0.0
    run_s: float = 0.0
    """The longest run."""
    failure: str = ""
    cut_off: bool = False


class TooSlow(DeadlineExceeded):
    """A batch did not end within the time of a run."""


class Bench(Protocol):
    """Where engines are measured."""

    def side_by_side(self, engine: EngineConfig) -> int:
        """Return the number of such engines that may be measured at the same time."""

    def all_fit(self, engines: Sequence[EngineConfig]) -> bool:
        """Return True if all can be up at the same time."""

    async def measure(self, engine: EngineConfig, runs: Sequence[int], start_s: float, run_s: float) -> Measured:
        """Start, warm up, run the batches of these numbers, stop. A start may take `start_s`, a run `run_s`."""

    def rounds(
        self, engines: Sequence[EngineConfig], runs: Sequence[int], start_s: float, run_s: float
    ) -> AsyncGenerator[tuple[float, ...]]:
        """Yield speeds of all engines in each of these runs, in turn. Errors are those of a start or a run."""


class EngineBench:
    """Measures engines on this host: each has its own GPUs, or no GPU and the whole CPU."""

    def __init__(self, batch: Batch, gpus: Sequence[str]) -> None:
        self._batch = batch
        self._num_gpus = len(gpus)
        self._free = list(gpus)
        self._given_back = asyncio.Condition()
        self._names = itertools.count()

    def side_by_side(self, engine: EngineConfig) -> int:
        needed = gpus_per_replica(engine)
        return max(1, self._num_gpus // needed) if needed else 1

    def all_fit(self, engines: Sequence[EngineConfig]) -> bool:
        return sum(map(gpus_per_replica, engines)) <= self._num_gpus

    async def measure(self, engine: EngineConfig, runs: Sequence[int], start_s: float, run_s: float) -> Measured:
        speeds, run_times, began = list[float](), [0.0], time.monotonic()
        try:
            async with self._serving(engine, start_s) as running:
                started_s = time.monotonic() - began
                for number in runs:
                    speed, seconds = await running.run(number, run_s)
                    run_times.append(seconds)
                    speeds.append(speed)
        except (EngineError, DeadlineExceeded, ConfigError) as error:
            return Measured(failure=str(error), cut_off=isinstance(error, TooSlow))
        return Measured(speeds=tuple(speeds), start_s=started_s, run_s=max(run_times))

    async def rounds(
        self, engines: Sequence[EngineConfig], runs: Sequence[int], start_s: float, run_s: float
    ) -> AsyncGenerator[tuple[float, ...]]:
        """Run engines that do not fit together: one at a time, several runs a start, in an order of few starts."""
        fit = self.all_fit(engines)
        at_a_time = 1 if fit else RUNS_A_START
        order = list(range(len(engines)))
        async with AsyncExitStack() as stack:
            up: dict[int, _Running] = {}
            for first in range(0, len(runs), at_a_time):
                speeds: list[dict[int, float]] = [{} for _ in runs[first : first + at_a_time]]
                for index in order:
                    if index not in up and not fit:
                        await stack.aclose()
                        up.clear()
                    if index not in up:
                        up[index] = await stack.enter_async_context(self._serving(engines[index], start_s))
                    for number, found in zip(runs[first:], speeds, strict=False):
                        found[index], _ = await up[index].run(number, run_s)
                for found in speeds:
                    yield tuple(found[index] for index in range(len(engines)))
                order.reverse()

    @asynccontextmanager
    async def _serving(self, engine: EngineConfig, start_s: float) -> AsyncIterator["_Running"]:
        """Yield an engine that has started and is warm. Errors are those of its start."""
        needed = gpus_per_replica(engine)
        if needed > self._num_gpus:
            raise ConfigError(f"it needs {needed} GPUs, and {self._num_gpus} are here")
        gpus = await self._take(needed)
        try:
            server = EngineServer(
                _bounded(engine, gpus, start_s), replica_id=f"{_GROUP}-{next(self._names)}", group=_GROUP, index=0
            )
            try:
                info = await server.start()
                running = _Running(info, self._batch.times(max(1, needed)), max(1, needed))
                try:
                    await running.warm_up(start_s)
                    yield running
                finally:
                    await running.close()
            finally:
                await server.stop()
        finally:
            async with self._given_back:
                self._free += gpus
                self._given_back.notify_all()

    async def _take(self, count: int) -> list[str]:
        async with self._given_back:
            await self._given_back.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
            return taken


class _Running:
    """An engine that serves, and its batch."""

    def __init__(self, info: ReplicaInfo, batch: Batch, gpus: int) -> None:
        if info.max_model_len is not None and batch.longest > info.max_model_len:
            raise ConfigError(
                f"the workload has sequences of {batch.longest} tokens, and the engine's max_model_len is "
                f"{info.max_model_len}: raise engine.max_model_len, or lower --prompt and --response"
            )
        self._engine = connect(info.kind, info.replica_id, info.url, info.engine_version, has_tee=info.has_tee)
        self._info = info
        self._batch = batch
        self._gpus = gpus

    async def warm_up(self, timeout_s: float) -> None:
        """Have the engine do its first work: compile, allocate, fill its caches."""
        late = DeadlineExceeded(f"the first requests were not answered within {timeout_s:.0f} s")
        await self._send(self._batch.opening(), "warm-up", timeout_s, late)

    async def run(self, number: int, timeout_s: float) -> tuple[float, float]:
        """Run the batch. Return tokens/s of each GPU, and the seconds from the first prompt to the last token."""
        began = time.monotonic()
        late = TooSlow(f"cut off: a batch was not done within {timeout_s:.1f} s")
        await self._send(self._batch, f"run {number}", timeout_s, late)
        seconds = time.monotonic() - began
        return self._batch.tokens / seconds / self._gpus, seconds

    async def close(self) -> None:
        await self._engine.close()

    async def _send(self, batch: Batch, seed: str, timeout_s: float, late: DeadlineExceeded) -> None:
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for index, ask in enumerate(batch.asks):
                    group.create_task(self._ask(ask, f"{seed} {index}", timeout_s + _MARGIN_S))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        except TimeoutError:
            raise late from None

    async def _ask(self, ask: Ask, seed: str, timeout_s: float) -> None:
        body = {"model": self._info.model, **ask.body(seed)}
        if self._info.streams:
            tokens = await _streamed(self._engine, body, timeout_s)
        else:
            tokens = _tokens(await self._engine.generate(_PATH, body, timeout_s))
        if tokens != ask.samples * ask.max_tokens:
            message = f"{tokens} tokens came of {ask.samples * ask.max_tokens} that were asked for"
            raise EngineFailed(message, replica_id=self._info.replica_id)


async def _streamed(engine: Engine, body: Json, timeout_s: float) -> int:
    async with aclosing(engine.stream(_PATH, body, timeout_s)) as chunks:
        return sum([_tokens(chunk) async for chunk in chunks])


def _tokens(reply: Json) -> int:
    return sum(len(choice.get("token_ids") or ()) for choice in reply.get("choices", ()))


def _bounded(engine: EngineConfig, gpus: Sequence[str], start_s: float) -> EngineConfig:
    """Return the configuration of one replica on these GPUs, whose start has to end in the time left."""
    change: Json = {"start_timeout_s": min(engine.start_timeout_s, max(1.0, start_s)), "num_replicas": 1}
    if gpus:
        change["env"] = {**engine.env, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return engine.model_copy(update=change)
