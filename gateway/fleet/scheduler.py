"""Places rollouts on replicas: a queue for each model, a gate that weight updates close before the policy's, and a
second try when a replica fails."""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from engines.engine import Json
from engines.errors import DeadlineExceeded, EngineError, EngineRefused
from gateway.config.schema import GatewayConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.replica import Replica
from gateway.fleet.routing import Rollout, choose, fresh_enough
from gateway.fleet.sessions import Sessions

log = structlog.get_logger()

T = TypeVar("T")


def using(rollout: Rollout) -> AbstractContextManager[None]:
    """Keeps the adapter of a rollout loaded, if it has one."""
    if rollout.adapter is None:
        return nullcontext()
    return rollout.adapter.used(rollout.request_id, goes_on=rollout.goes_on)


@dataclass(eq=False)
class _Waiter:
    rollout: Rollout
    avoid: set[str]
    placed: "asyncio.Future[Replica]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Scheduler:
    """First come, first placed among the rollouts of one model; models never wait for each other.

    Nothing of the policy is placed while the gate is closed; what runs goes on.
    """

    def __init__(self, config: GatewayConfig, fleet: Fleet, metrics: Metrics) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._queues: defaultdict[str, deque[_Waiter]] = defaultdict(deque)
        self._closed_for: set[str] = set()
        self._sessions = Sessions()
        fleet.on_change(self._pump_all)

    def queue_length(self, model: str) -> int:
        return sum(not waiter.placed.done() for waiter in self._queues[model])

    def waits(self, rollout: Rollout) -> bool:
        """Whether it has no replica yet."""
        return any(one.rollout is rollout and not one.placed.done() for one in self._queues[rollout.model])

    @property
    def closed_for(self) -> list[str]:
        """Why nothing of the policy is placed now; empty when the gate is open."""
        return sorted(self._closed_for)

    def close_gate(self, reason: str) -> None:
        self._closed_for.add(reason)

    def open_gate(self, reason: str) -> None:
        self._closed_for.discard(reason)
        self._pump_all()

    async def drained(self, timeout_s: float) -> None:
        """Returns when no rollout of the policy is in flight anywhere."""
        try:
            async with asyncio.timeout(timeout_s):
                for replica in self._fleet.trained:
                    await replica.idle.wait()
        except TimeoutError as error:
            busy = [replica.replica_id for replica in self._fleet.trained if replica.load_samples]
            raise DeadlineExceeded(
                f"rollouts still run on {', '.join(busy)} after {timeout_s:g} s: raise weights.drain_timeout_s, or "
                "pause with mode=keep or mode=abort before the update"
            ) from error

    async def run(self, rollout: Rollout, call: Callable[[Replica], Awaitable[T]]) -> T:
        """The call's result from the first replica that gives one."""
        avoid: set[str] = set()
        with using(rollout):
            while True:
                async with self._placed(rollout, avoid) as replica:
                    try:
                        return await replica.unless_lost(call(replica))
                    except EngineRefused:
                        raise
                    except EngineError as error:
                        self._failed(rollout, replica, error, avoid)

    async def stream(
        self, rollout: Rollout, call: Callable[[Replica], AsyncGenerator[Json]]
    ) -> AsyncGenerator[tuple[Replica, Json]]:
        """Chunks of the first replica that gives any. What has begun is not begun again elsewhere."""
        avoid: set[str] = set()
        with using(rollout):
            while True:
                begun = False
                async with self._placed(rollout, avoid) as replica, aclosing(call(replica)) as chunks:
                    try:
                        while (chunk := await replica.unless_lost(anext(chunks, None))) is not None:
                            await replica.unless_lost(replica.vouched())
                            begun = True
                            yield replica, chunk
                        return
                    except EngineRefused:
                        raise
                    except EngineError as error:
                        if begun:
                            raise
                        self._failed(rollout, replica, error, avoid)

    def _failed(self, rollout: Rollout, replica: Replica, error: EngineError, avoid: set[str]) -> None:
        """Note a failure; raise it when there was one too many. One that an update cut off has not failed."""
        if replica.cuts_off:
            self._metrics.retries.inc()
            return
        avoid.add(replica.replica_id)
        if replica.can_serve:  # one that was fenced is out already, and says why
            self._fleet.suspect(replica, str(error))
        log.warning("rollout failed", request=rollout.request_id, replica=replica.replica_id, error=str(error))
        if len(avoid) >= self._config.max_attempts:
            raise error
        self._metrics.retries.inc()

    @asynccontextmanager
    async def _placed(self, rollout: Rollout, avoid: set[str]) -> AsyncIterator[Replica]:
        replica = await self._place(rollout, avoid)
        try:
            with replica.carrying(rollout):
                yield replica
        finally:
            self._pump(rollout.model)

    async def _place(self, rollout: Rollout, avoid: set[str]) -> Replica:
        waiter, began = _Waiter(rollout, avoid), time.monotonic()
        queue = self._queues[rollout.model]
        (queue.appendleft if rollout.goes_on else queue.append)(waiter)
        self._pump(rollout.model)
        try:
            async with asyncio.timeout(self._config.queue_timeout_s):
                return await waiter.placed
        except BaseException as error:
            if waiter.placed.done() and not waiter.placed.cancelled():
                with waiter.placed.result().carrying(rollout):
                    pass  # placed in the very moment the client left: give the place back
            waiter.placed.cancel()
            self._pump(rollout.model)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(self._why_not_placed(rollout)) from error
            raise
        finally:
            self._metrics.queue_seconds.labels(rollout.model).observe(time.monotonic() - began)

    def _pump_all(self) -> None:
        for model in self._queues:
            self._pump(model)

    def _pump(self, model: str) -> None:
        """Place rollouts of a model's queue while there is room, first come, first placed.

        Rollouts wait in front of others without holding them up where no replica is as fresh as they demand. Those that
        wait for room keep the replicas they could go to for themselves, or a large one would wait for ever.
        """
        queue, kept = self._queues[model], deque[_Waiter]()
        taken: set[Replica] = set()
        while queue and not self._is_closed(model):
            waiter = queue.popleft()
            if waiter.placed.done():
                continue
            able = self._able(waiter, model)
            rollout = waiter.rollout
            home = self._sessions.home(model, rollout.session)
            replica = choose(rollout, (replica for replica in able if replica not in taken), home)
            if replica is not None:
                self._sessions.settle(model, rollout.session, replica.replica_id)
                replica.reserve(rollout)
                waiter.placed.set_result(replica)
                continue
            kept.append(waiter)
            taken.update(able)
            if taken.issuperset(self._fleet.serving(model)):
                break
        queue.extendleft(reversed(kept))

    def _able(self, waiter: _Waiter, model: str) -> list[Replica]:
        """Replicas that may take a rollout: fresh ones, and of these others than it has failed on, if there are any."""
        serving = self._fleet.serving(model, waiter.rollout.adapter)
        fresh = fresh_enough(waiter.rollout, serving, self._fleet.target_of(model))
        return [replica for replica in fresh if replica.replica_id not in waiter.avoid] or fresh

    def _is_closed(self, model: str) -> bool:
        return bool(self._closed_for) and model == self._fleet.models.policy

    def _why_not_placed(self, rollout: Rollout) -> str:
        model, newest = rollout.model, self._fleet.target_of(rollout.model)
        replicas = [replica for replica in self._fleet.replicas if replica.info.model == model]
        states = ", ".join(f"{r.replica_id} {r.state} version {r.weight_version}" for r in replicas) or "none"
        closed = f"; the gate is closed for: {', '.join(self.closed_for)}" if self._is_closed(model) else ""
        least = rollout.least_version(newest)
        demands = (
            f", which demands version {least} or newer (min_version = {rollout.min_version}, max_staleness = "
            f"{rollout.max_staleness}, the newest is {newest})"
            if least
            else ""
        )
        return (
            f"no replica of {model!r} took the rollout{demands} within {self._config.queue_timeout_s:g} s "
            f"(gateway.queue_timeout_s); replicas: {states}{closed}"
        )
