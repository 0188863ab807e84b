"""The doors of a worker: for the clients whose connections the owner hands it, and for the other processes."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ssl import SSLContext, SSLError
from typing import cast

import structlog
from aiohttp import web

from gateway.http.door import Door

log = structlog.get_logger()

_AT_ONCE = 64


class BackDoor(Door):
    """Listens on a Unix socket at `path`."""

    def __init__(self, runner: web.AppRunner, path: str) -> None:
        super().__init__(runner, path, 0)
        self._path = path

    @property
    def name(self) -> str:
        return f"http://unix:{self._path}"

    async def _open(self) -> asyncio.AbstractServer:
        loop = asyncio.get_running_loop()
        return await loop.create_unix_server(self._connection, self._path, backlog=self._backlog)


class HandedDoor(Door):
    """Serves connections that come as descriptors over `handed`."""

    def __init__(self, runner: web.AppRunner, handed: socket.socket, context: SSLContext | None) -> None:
        super().__init__(runner, "handed", handed.fileno(), context)
        self._handed = handed
        self._beginning = 0
        self.taken = 0
        """All connections since the start."""

    @property
    def num_connections(self) -> int:
        """Those that are open."""
        server = self._runner.server
        return self._beginning + (len(server.connections) if server is not None else 0)

    async def _open(self) -> asyncio.AbstractServer:
        return cast(asyncio.AbstractServer, _Handed(self._handed, self._take, self._lose))

    def _lose(self) -> None:
        self.taken += 1
        log.warning("a connection is closed: no descriptor is left")

    async def _take(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.taken += 1
        self._beginning += 1
        try:
            with suppress(OSError, SSLError):  # the client has left, or speaks no TLS
                await loop.connect_accepted_socket(self._connection, connection, ssl=self._ssl_context)
        finally:
            self._beginning -= 1


class _Handed:
    """Takes connections until it is closed. `sockets` is as that of a server of asyncio."""

    def __init__(
        self, handed: socket.socket, take: Callable[[socket.socket], Awaitable[None]], lose: Callable[[], None]
    ) -> None:
        self.sockets: list[socket.socket] = []
        self._handed = handed
        self._take = take
        self._lose = lose
        self._tasks: set[asyncio.Future[None]] = set()
        handed.setblocking(False)
        asyncio.get_running_loop().add_reader(handed, self._receive)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handed)
        self._handed.close()

    def _receive(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                word, descriptors, _, _ = socket.recv_fds(self._handed, 1, 1)
            except BlockingIOError:
                return
            if not word:  # the owner has ended, and this process is about to
                asyncio.get_running_loop().remove_reader(self._handed)
                return
            if not descriptors:  # this process has none left for it, and it is closed
                self._lose()
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                task = asyncio.ensure_future(self._take(connection))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
