"""A workload on the gateway's own fleet and scheduler, with a model in the place of each engine."""

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count

import structlog

from engines.errors import ConfigError
from gateway.config.schema import Config
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica
from tuning.simulate import virtual_time
from tuning.simulate.bound import bound_s
from tuning.simulate.engine import ModelledEngine, Sample
from tuning.simulate.modelled_fleet import ModelledFleet
from tuning.simulate.outcome import Outcome, outcome_of
from tuning.simulate.placements import Placed, Placement
from tuning.simulate.pool import Pool, PoolRun
from tuning.simulate.speed import Speed
from tuning.simulate.workloads.workload import Ask, Chain, Stream, Workload

# A gateway sees its engines make tokens all the time, and so no rollout waits too long while they do.
_LOOKS_IN_PATIENCE = 4


def simulated(
    config: Config, speeds: Mapping[str, Speed], workload: Workload, placed: Placed, pool: Pool | None = None
) -> Outcome:
    """Run a workload to its end. `speeds` are those of the engine groups that take part. With `pool` its batches come
    out of it.

    Raise `ConfigError` where a sample fits into no KV cache.
    """
    _check_room(workload, speeds)

    async def main() -> Outcome:
        fleet = ModelledFleet(config, speeds)
        async with fleet.running() as served:
            run = _Run(fleet, placed(fleet.config, served))
            seconds = await run.play(workload, pool)
        engines = list(fleet.engines.values())
        bound = bound_s(workload, [engine.speed for engine in engines])
        counts = [engine.counts for engine in engines]
        return outcome_of(seconds, bound, run.latencies, run.late, counts, run.pools)

    with _without_reports():
        return virtual_time.run(main)


@contextmanager
def _without_reports() -> Iterator[None]:
    """Log warnings alone: a simulated fleet's replicas join each time, which is no news."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        yield
    finally:
        structlog.configure(**before)


class _Run:
    """One run of a workload. `late` counts prompts whose work on a replica the gateway would have ended."""

    def __init__(self, fleet: ModelledFleet, placement: Placement) -> None:
        self.latencies: list[float] = []
        self.late = 0
        self.pools: list[PoolRun] = []
        self._fleet = fleet
        self._config = fleet.config.gateway
        self._placement = placement
        self._clock = asyncio.get_running_loop().time
        self._ids = count()

    async def play(self, workload: Workload, pool: Pool | None) -> float:
        """Return the seconds that it took."""
        began = self._clock()
        most = self._config.samples_together
        self.pools = [PoolRun(stream, pool, self._ask_of_pool, self._rank, most) for stream in workload.streams if pool]
        async with asyncio.TaskGroup() as tasks:
            for stream in () if pool else workload.streams:
                tasks.create_task(self._play(stream))
            for played in self.pools:
                tasks.create_task(played.play())
        return self._clock() - began

    async def _play(self, stream: Stream) -> None:
        for phase in stream:
            async with asyncio.TaskGroup() as tasks:
                for chain in sorted(phase, key=self._rank):  # as the dialects order the prompts of a request
                    tasks.create_task(self._follow(chain))

    async def _follow(self, chain: Chain) -> None:
        for ask in chain:
            if ask.after_s:
                await asyncio.sleep(ask.after_s)
            await self._ask_all(ask)
            if ask.is_last:
                self._placement.finish_session(ask.session)

    async def _ask_all(self, ask: Ask) -> None:
        with self._timed():
            if len(parts := ask.parts(self._config.samples_together)) == 1:
                await self._ask(ask, [])
                return
            async with asyncio.TaskGroup() as tasks:
                for part in parts:
                    tasks.create_task(self._ask(part, []))

    async def _ask_of_pool(self, ask: Ask, samples: list[Sample]) -> None:
        with self._timed():
            await self._ask(ask, samples)

    async def _ask(self, ask: Ask, samples: list[Sample]) -> None:
        rollout = self._rollout(ask)
        await self._placement.run(rollout, partial(self._made, ask, samples))
        self._placement.delivered(rollout, ask.prompt, sum(ask.lengths))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Note the time of an ask that ends well."""
        began = self._clock()
        yield
        self.latencies.append(self._clock() - began)

    def _rank(self, chain: Chain) -> float:
        return self._rollout(chain[0]).rank

    def _rollout(self, ask: Ask) -> Rollout:
        """Return what the dialects make of a request."""
        expected = self._placement.expected(self._fleet.model, ask.text)
        return Rollout(
            request_id=f"{ask.request}-{next(self._ids)}",
            request=ask.request,
            model=self._fleet.model,
            n=len(ask.lengths),
            tokens=ask.prompt + len(ask.lengths) * min(ask.limit, math.ceil(expected or ask.limit)),
            goes_on=ask.made > 0,
            prompt_tokens=ask.prompt,
            session=ask.session,
            expected=expected,
            prompt_key=ask.text,
        )

    async def _made(self, ask: Ask, samples: list[Sample], replica: Replica) -> None:
        """Return when all samples of a prompt are made; they are on the list meanwhile, and stopped where it ends."""
        engine, began = self._fleet.engines[replica.replica_id], self._clock()
        made = _generate(ask, engine, samples)
        try:
            while not made.done():
                await asyncio.wait([made], timeout=self._config.queue_timeout_s / _LOOKS_IN_PATIENCE)
                replica.saw_progress()
        finally:
            if not made.done():
                engine.stop(samples)
        self.late += self._clock() - began > self._config.generate_timeout_s


def _generate(ask: Ask, engine: ModelledEngine, samples: list[Sample]) -> "asyncio.Future[None]":
    """Have an engine make the samples of a prompt, put on the list; the future ends with the last."""
    made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = len(ask.lengths)

    def ended() -> None:
        nonlocal left
        left -= 1
        if not left:
            made.set_result(None)

    samples += [
        Sample(
            prefix=ask.prefix, prompt=ask.prompt, tokens=length, ended=ended, goes_on=bool(ask.session),
            known=ask.known, made=ask.made,
        )
        for length in ask.lengths
    ]  # fmt: skip
    engine.add(samples)
    return made


def _check_room(workload: Workload, speeds: Mapping[str, Speed]) -> None:
    longest = max(ask.longest for ask in workload.asks())
    for group, speed in speeds.items():
        if longest > speed.kv_tokens:
            raise ConfigError(
                f"engines.{group}: a sample of the workload has {longest} tokens with its prompt, and the KV cache "
                f"holds {speed.kv_tokens}: make its lengths shorter, or give the engine a larger cache "
                "(engine.sim.kv_tokens, or --gpu)"
            )
