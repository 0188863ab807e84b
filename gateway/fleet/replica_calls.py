"""Calls on replicas: one on many at once, each bounded, each failure with its replica; the end of their rollouts."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

from engines.errors import DeadlineExceeded, EngineError, WeightUpdateFailed
from engines.types import PauseMode, ReplicaState
from gateway.fleet.brake import Holder
from gateway.fleet.concurrency import is_set_within, together
from gateway.fleet.replica import Replica

log = structlog.get_logger()

T = TypeVar("T")

_HEALTH_TIMEOUT_S = 10.0
_CUT_OFF_AGAIN_S = 0.2
_CUT_OFF_GRACE_S = 5.0
_GIVEN_UP_S = 1.0


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


async def cut_off(replica: Replica, *, by: Holder, timeout_s: float) -> None:
    """End all rollouts of the replica with the tokens they have; they go on elsewhere. The caller bounds this.

    A request that was on its way when the engine stopped waits there unread. Another pause ends it; where the engine
    does not read it even then, it is dropped after some seconds and retried elsewhere.
    """
    replica.cuts_off = True
    try:
        grace_ends = time.monotonic() + _CUT_OFF_GRACE_S
        while True:
            await replica.brake.stop(by, PauseMode.ABORT, clear_cache=False, timeout_s=timeout_s)
            if await is_set_within(replica.idle, _CUT_OFF_AGAIN_S):
                return
            if time.monotonic() > grace_ends:
                replica.drop_calls()
    finally:
        try:
            if not replica.idle.is_set():  # it was given up: what the engine has ended is no reply of a client's abort
                replica.drop_calls(rollouts_alone=True)
                await is_set_within(replica.idle, _GIVEN_UP_S)
        finally:
            replica.cuts_off = False
