"""Calls on replicas: one on many at once, each bounded, each failure with its replica."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

from engines.errors import DeadlineExceeded, EngineError, WeightUpdateFailed
from engines.types import ReplicaState
from gateway.fleet.concurrency import together
from gateway.fleet.replica import Replica

log = structlog.get_logger()

T = TypeVar("T")

_HEALTH_TIMEOUT_S = 10.0


async def on_one(replica: Replica, call: Callable[[Replica], Awaitable[T]], timeout_s: float) -> T:
    """Return the result, within `timeout_s`, and before the replica is LOST. Raise `WeightUpdateFailed` or
    `DeadlineExceeded`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await replica.unless_lost(call(replica), is_control=True)
    except EngineError as error:
        raise WeightUpdateFailed(str(error), replica_id=replica.replica_id) from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"replica {replica.replica_id} did not answer within {timeout_s:g} s") from error


async def on_all(replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[T]], timeout_s: float) -> list[T]:
    """Return the results in the order of the replicas. The first failure cancels the other calls; raise as `on_one`."""
    if not replicas:
        raise WeightUpdateFailed("there is no replica to call: see /health")
    return await together(on_one(replica, call, timeout_s) for replica in replicas)


async def on_living(replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[T]], timeout_s: float) -> list[T]:
    """As `on_all`, without the results of replicas that turn out to be dead: their engines hold nothing any more."""

    async def on_it(replica: Replica) -> list[T]:
        try:
            return [await on_one(replica, call, timeout_s)]
        except WeightUpdateFailed:
            if not await is_dead(replica):
                raise
            return []

    if not replicas:
        return await on_all(replicas, call, timeout_s)  # which tells it
    return [result for results in await together(map(on_it, replicas)) for result in results]


async def failures_on(
    replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[object]], timeout_s: float
) -> dict[Replica, WeightUpdateFailed | DeadlineExceeded]:
    """Make the call on all to its end. Return the failures."""
    failed: dict[Replica, WeightUpdateFailed | DeadlineExceeded] = {}

    async def attempt(replica: Replica) -> None:
        try:
            await on_one(replica, call, timeout_s)
        except (WeightUpdateFailed, DeadlineExceeded) as error:
            failed[replica] = error

    await together(map(attempt, replicas))
    return failed


async def try_on_all(
    replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[object]], timeout_s: float, what: str
) -> None:
    """Make the call and log failures as `what`: a probe or the canary finds a replica that failed."""
    for replica, error in (await failures_on(replicas, call, timeout_s)).items():
        log.warning(what, replica=replica.replica_id, error=str(error))


def names(replicas: Sequence[Replica]) -> str:
    return ", ".join(f"{replica.replica_id} ({replica.info.kind} at {replica.info.url})" for replica in replicas)


async def is_dead(replica: Replica) -> bool:
    """Return True where a replica that failed a call also fails its health check."""
    if replica.state is ReplicaState.LOST:
        return True
    try:
        await replica.engine.health(_HEALTH_TIMEOUT_S)
    except (EngineError, DeadlineExceeded):
        return True
    return False
