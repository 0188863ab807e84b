"""Takes the connections of clients from the rollout port, and hands each to the worker that has the fewest."""

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import structlog

from gateway.http.door import BACKLOG
from gateway.http.workers.link import Link

log = structlog.get_logger()

_AT_ONCE = 64
_AGAIN_S = 0.2


async def listening_at(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at all addresses of a host, as those of asyncio's `create_server`. A family of addresses that
    this machine has switched off is passed over. Raise `OSError` where one of them, or all, cannot be bound."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as bound:
        listening: list[socket.socket] = []
        refused = OSError(errno.EADDRNOTAVAIL, "the host has no address")
        for family, kind, proto, _, address in dict.fromkeys(found):
            one = bound.enter_context(socket.socket(family, kind, proto))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                one.bind((address[0], port, *address[2:]))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                refused = error
                one.close()
                continue
            one.listen(BACKLOG)
            listening.append(one)
            port = one.getsockname()[1]  # also where it was 0: all have the same
        if not listening:
            raise refused
        bound.pop_all()
    return listening


class Porter:
    """Stands at listening sockets. Connections wait there while no worker serves."""

    def __init__(self, listening: Sequence[socket.socket], serving: Callable[[], Sequence[Link]]) -> None:
        self._listening = listening
        self._serving = serving
        self._again: asyncio.TimerHandle | None = None
        self._held: socket.socket | None = None
        """A connection that no worker has taken yet."""
        for one in listening:
            one.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stop listening."""
        if self._again is not None:
            self._again.cancel()
        for one in self._listening:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        if self._held is not None:
            self._held.close()

    def _listen(self) -> None:
        self._again = None
        for one in self._listening:
            asyncio.get_running_loop().add_reader(one, self._take, one)
        if self._held is not None:  # its listening socket has none behind it, maybe for ever
            self._take(self._listening[0])

    def _take(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if not (serving := self._serving()):
                self._rest()
                return
            try:
                connection = self._held or listening.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("connections wait", error=str(error))  # no descriptor is left
                self._rest()
                return
            if not _is_handed(connection, serving):
                self._held = connection
                self._rest()
                return
            self._held = None
            connection.close()  # the worker has a descriptor of its own

    def _rest(self) -> None:
        loop = asyncio.get_running_loop()
        for one in self._listening:
            loop.remove_reader(one)
        if self._again is None:
            self._again = loop.call_later(_AGAIN_S, self._listen)


def _is_handed(connection: socket.socket, serving: Sequence[Link]) -> bool:
    """Hand a connection over. False where no worker takes it now: each has many that it has not taken yet."""
    for link in sorted(serving, key=lambda link: link.num_connections):
        with suppress(OSError):  # it has just ended, or takes none for the moment
            link.hand(connection)
            return True
    return False
