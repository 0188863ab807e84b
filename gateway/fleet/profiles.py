"""Profiles of engines while they serve, by the engines' own profilers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from engines.errors import InvalidRequest
from gateway.fleet.replica import Replica

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 600.0
"""A torch profile of some seconds has 100 MB and takes a minute to write."""


async def record(replicas: Sequence[Replica], seconds: float) -> dict[str, list[Path]]:
    """Record replicas for some seconds. Return the files that their profilers wrote, by replica id.

    Profilers that were started are stopped, also where another replica fails or the caller leaves.
    """
    known = {replica: _files(replica) for replica in replicas}
    started: list[Replica] = []
    try:
        for replica in replicas:
            await replica.engine.start_profile(replica.info.profiles, _START_TIMEOUT_S)
            started.append(replica)
        await asyncio.sleep(seconds)
    finally:
        ends = await asyncio.gather(
            *(replica.engine.stop_profile(_STOP_TIMEOUT_S) for replica in started), return_exceptions=True
        )
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return {replica.replica_id: sorted(_files(replica) - known[replica]) for replica in replicas}


def check_can_be_profiled(replica: Replica) -> None:
    """Raise `InvalidRequest` for a replica without a profiler, and where this machine does not see its files."""
    folder = replica.info.profiles
    if not folder:
        raise InvalidRequest(
            f"replica {replica.replica_id} has no profiler: set engine.profiling: true and start it again",
            param="replicas",
        )
    if not Path(folder).is_dir():
        raise InvalidRequest(
            f"replica {replica.replica_id} writes profiles into {folder} of its own node: put engine.log_dir on a file "
            "system that the gateway's node shares",
            param="replicas",
        )


def _files(replica: Replica) -> set[Path]:
    return {path for path in Path(replica.info.profiles).rglob("*") if path.is_file()}
