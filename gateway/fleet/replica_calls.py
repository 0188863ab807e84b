"""One call on many replicas at once: each bounded, each failure with its replica."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import structlog

from engines.engine import Engine
from engines.errors import DeadlineExceeded, EngineError, WeightUpdateFailed
from engines.types import ReplicaState
from gateway.fleet.replica import Replica
from gateway.fleet.together import together

log = structlog.get_logger()

T = TypeVar("T")

_HEALTH_TIMEOUT_S = 10.0


async def on_all(replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[T]], timeout_s: float) -> list[T]:
    """The results in the order of the replicas. The first failure cancels the other calls.

    Raises `WeightUpdateFailed` or `DeadlineExceeded`.
    """
    if not replicas:
        raise WeightUpdateFailed("there is no replica to call: see /health")
    return await together(on_one(replica, call, timeout_s) for replica in replicas)


async def try_on_all(replicas: Sequence[Replica], call: Callable[[Engine], Awaitable[None]]) -> None:
    """Make the call and log failures: a probe or the canary finds a replica that failed."""
    results = await asyncio.gather(*(call(replica.engine) for replica in replicas), return_exceptions=True)
    for replica, result in zip(replicas, results, strict=True):
        if isinstance(result, Exception):
            log.warning("left out of a call", replica=replica.replica_id, error=str(result))


async def prepare_all(replicas: Sequence[Replica], path: str, version: int, timeout_s: float) -> list[Replica]:
    """Read a version ahead while replicas serve. Return those that have answered. A replica where that fails only takes
    longer to load the version."""

    async def prepare(replica: Replica) -> bool:
        try:
            await on_one(replica, lambda one: one.engine.prepare_snapshot(path, version, timeout_s), timeout_s)
        except (WeightUpdateFailed, DeadlineExceeded) as error:
            log.warning("not prepared for a version", replica=replica.replica_id, version=version, error=str(error))
            return False
        return True

    answered = await together(prepare(replica) for replica in replicas)
    return [replica for replica, has_answered in zip(replicas, answered, strict=True) if has_answered]


def names(replicas: Sequence[Replica]) -> str:
    return ", ".join(f"{replica.replica_id} ({replica.info.kind} at {replica.info.url})" for replica in replicas)


async def on_one(replica: Replica, call: Callable[[Replica], Awaitable[T]], timeout_s: float) -> T:
    """The result, within `timeout_s`, and before the replica is LOST. Raises as `on_all`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await replica.unless_lost(call(replica), is_control=True)
    except EngineError as error:
        raise WeightUpdateFailed(str(error), replica_id=replica.replica_id) from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"replica {replica.replica_id} did not answer within {timeout_s:g} s") from error


async def is_dead(replica: Replica) -> bool:
    """True where a replica that failed a call also fails its health check."""
    if replica.state is ReplicaState.LOST:
        return True
    try:
        await replica.engine.health(_HEALTH_TIMEOUT_S)
    except (EngineError, DeadlineExceeded):
        return True
    return False
