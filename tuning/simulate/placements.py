"""Placements that a workload can run under: the gateway's scheduler, and round robin to compare it with."""

from collections.abc import Awaitable, Callable
from itertools import count
from typing import Protocol, TypeVar

from gateway.config.schema import Config
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.replica import Replica

T = TypeVar("T")


class Placement(Protocol):
    """The part of the scheduler that a simulation calls, as the dialects do."""

    def expected(self, model: str, prompt_key: int) -> float | None: ...

    async def run(self, rollout: Rollout, call: Callable[[Replica], Awaitable[T]]) -> T: ...

    def delivered(self, rollout: Rollout, prompt_tokens: int, completion_tokens: int) -> None: ...

    def finish_session(self, name: str) -> bool: ...


Placed = Callable[[Config, Fleet], Placement]


def by_the_gateway(config: Config, fleet: Fleet) -> Placement:
    """Return the gateway's own scheduler, as it is built in a gateway."""
    return _Gateways(Scheduler(config.gateway, fleet, Metrics()))


def without_lengths(config: Config, fleet: Fleet) -> Placement:
    """Return the gateway's own scheduler, which meets every prompt for the first time."""
    return _Forgetful(Scheduler(config.gateway, fleet, Metrics()))


def in_turn(config: Config, fleet: Fleet) -> Placement:
    """Return round robin."""
    return _RoundRobin(fleet)


class _Gateways:
    """The scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def expected(self, model: str, prompt_key: int) -> float | None:
        return self._scheduler.lengths.of(model, prompt_key)

    async def run(self, rollout: Rollout, call: Callable[[Replica], Awaitable[T]]) -> T:
        return await self._scheduler.run(rollout, call)

    def delivered(self, rollout: Rollout, prompt_tokens: int, completion_tokens: int) -> None:
        self._scheduler.delivered(rollout, prompt_tokens, completion_tokens)

    def finish_session(self, name: str) -> bool:
        return self._scheduler.finish_session(name)


class _Forgetful(_Gateways):
    def expected(self, model: str, prompt_key: int) -> float | None:
        return None


class _RoundRobin:
    """Each prompt to the next replica, at once: engines keep what waits."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turn = count()

    async def run(self, rollout: Rollout, call: Callable[[Replica], Awaitable[T]]) -> T:
        replicas = self._fleet.serving(rollout.model)
        return await call(replicas[next(self._turn) % len(replicas)])

    def expected(self, model: str, prompt_key: int) -> float | None:
        return None

    def delivered(self, rollout: Rollout, prompt_tokens: int, completion_tokens: int) -> None:
        """Nothing is learnt."""

    def finish_session(self, name: str) -> bool:
        return False
