"""Profiles of engines as an archive."""

import asyncio
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

from aiohttp import web
from msgspec import Meta, Struct

from engines.errors import InvalidRequest
from gateway.dialects.fields import read_fields
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.http.access import Access
from gateway.http.json_body import read_object

_CHUNK_BYTES = 1 << 20
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 600.0
"""A torch profile of some seconds has 100 MB and takes a minute to write."""


class _Asked(Struct):
    seconds: Annotated[float, Meta(gt=0, le=600)] = 5.0
    replicas: list[str] | None = None


@dataclass(eq=False)
class ProfileRoutes:
    """Records of engines by their own profilers, while they serve."""

    fleet: Fleet

    def __post_init__(self) -> None:
        self._recording = asyncio.Lock()

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        router.add_post("/profile", access.for_admin(self._profile))

    async def _profile(self, request: web.Request) -> web.StreamResponse:
        """Record engines for some seconds, and reply with a tar archive of their profilers' files."""
        asked = read_fields(_Asked, await read_object(request, required=False))
        replicas = self._chosen(asked.replicas)
        if self._recording.locked():
            raise InvalidRequest("engines are being profiled: wait for its end, as a profiler records once at a time")
        async with self._recording:
            files = await _record(replicas, asked.seconds)
        with tempfile.TemporaryFile() as archive:
            await asyncio.to_thread(_pack, files, archive)
            return await _send(request, archive)

    def _chosen(self, names: list[str] | None) -> Sequence[Replica]:
        """Return the replicas of these ids or labels; without names all that can serve."""
        known = {name: one for one in self.fleet.replicas for name in (one.replica_id, one.label)}
        if unknown := set(names or ()) - known.keys():
            raise InvalidRequest(f"there is no replica {', '.join(sorted(unknown))}: see /status", param="replicas")
        found = [one for one in self.fleet.replicas if one.can_serve] if names is None else [known[n] for n in names]
        if not found:
            raise InvalidRequest("there is no replica to profile: see /status", param="replicas")
        for replica in found:
            _check_can_be_profiled(replica)
        return list(dict.fromkeys(found))


async def _record(replicas: Sequence[Replica], seconds: float) -> dict[str, list[Path]]:
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


def _check_can_be_profiled(replica: Replica) -> None:
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


def _pack(files: Mapping[str, Sequence[Path]], archive: IO[bytes]) -> None:
    """Move files into an archive, in a folder for each replica."""
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for replica_id, paths in files.items():
            for path in paths:
                tar.add(path, f"{replica_id}/{path.name}")
                path.unlink()
    archive.seek(0)


async def _send(request: web.Request, archive: IO[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-tar"})
    await response.prepare(request)
    while piece := await asyncio.to_thread(archive.read, _CHUNK_BYTES):
        await response.write(piece)
    await response.write_eof()
    return response
