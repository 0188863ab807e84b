"""The files of stored weight versions over HTTP, for machines that do not share the store.

`engines/store/peer_store.py` is the client.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from engines.errors import InvalidRequest, StoreFailed
from engines.store.peer_store import VERSIONS_PATH
from gateway.fleet.fleet import Fleet
from gateway.http.access import Access
from gateway.http.json_body import reply
from gateway.weights.snapshots import Snapshots

_CHUNK_BYTES = 1 << 20


@dataclass(eq=False)
class SnapshotFiles:
    """Lists versions and their files, and sends files, with ranges. A version is not removed while it is read."""

    fleet: Fleet
    snapshots: Snapshots

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        version = VERSIONS_PATH + r"/{version:[0-9]{1,19}}"
        router.add_get(VERSIONS_PATH, access.for_store(self._list_versions))
        router.add_get(version, access.for_store(self._list_files))
        router.add_get(version + "/{file}", access.for_store(self._send))

    async def _list_versions(self, request: web.Request) -> web.Response:
        # The store may hold versions of an earlier gateway. Reading the fleet's version makes it known.
        with contextlib.suppress(StoreFailed):
            async with self._reading(self.fleet.version):
                pass
        served = self.fleet.version  # a newer version is not verified yet
        return reply(
            {"versions": [version for version in self.snapshots.versions if version <= served], "served": served}
        )

    async def _list_files(self, request: web.Request) -> web.Response:
        version = int(request.match_info["version"])
        async with self._reading(version) as folder:
            sizes = await self.snapshots.in_thread(_sizes, folder)
        return reply({"version": version, "files": [{"name": name, "bytes": sizes[name]} for name in sorted(sizes)]})

    async def _send(self, request: web.Request) -> web.StreamResponse:
        version, name = int(request.match_info["version"]), request.match_info["file"]
        async with self._reading(version) as folder:
            sizes = await self.snapshots.in_thread(_sizes, folder)
            if name not in sizes:
                raise InvalidRequest(f"version {version} has no file {name!r}", param="file")
            return await self._send_part(request, folder / name, sizes[name])

    async def _send_part(self, request: web.Request, path: Path, size: int) -> web.StreamResponse:
        """Send the bytes that `Range` names. Reads run in a thread: no token waits for the disk."""
        begin, end, is_part = _span(request, size)
        response = web.StreamResponse(status=206 if is_part else 200, headers={"Accept-Ranges": "bytes"})
        response.content_length, response.content_type = end - begin, "application/octet-stream"
        if is_part:
            response.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        await response.prepare(request)
        while begin < end:
            piece = await self.snapshots.in_thread(_piece, path, begin, min(_CHUNK_BYTES, end - begin))
            assert piece, f"{path} was cut short while it was read: versions never change"
            await response.write(piece)
            begin += len(piece)
        await response.write_eof()
        return response

    def _reading(self, version: int) -> contextlib.AbstractAsyncContextManager[Path]:
        return self.snapshots.reading(version, self.fleet.label)


def _piece(path: Path, begin: int, size: int) -> bytes:
    """Read bytes of a file, which is opened for them alone: no client that leaves keeps it open."""
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(size)


def _span(request: web.Request, size: int) -> tuple[int, int, bool]:
    """Return first byte, end (exclusive), and True for a partial request."""
    try:
        asked = request.http_range
    except ValueError as error:
        raise InvalidRequest(f"Range: {error}", param="Range") from error
    begin, end, _ = asked.indices(size)
    if begin >= end and size:
        raise InvalidRequest(
            f"Range {request.headers.get('Range')!r} is outside the file of {size} bytes", param="Range"
        )
    return begin, end, asked != slice(None, None, 1)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of a version's files, by their names."""
    return {path.name: path.stat().st_size for path in folder.iterdir() if _is_sent(path)}


def _is_sent(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")
