"""Takes the connections of clients from the rollout port, and hands each to the worker that has the fewest."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from gateway.http.workers.link import Link

log = structlog.get_logger()

_AT_ONCE = 64
_AGAIN_S = 0.2


class Porter:
    """Stands at a listening socket. Connections wait there while no worker serves."""

    def __init__(self, listening: socket.socket, serving: Callable[[], Sequence[Link]]) -> None:
        self._listening = listening
        self._serving = serving
        self._again: asyncio.TimerHandle | None = None
        self._held: socket.socket | None = None
        """A connection that no worker has taken yet."""
        listening.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stop listening."""
        if self._again is not None:
            self._again.cancel()
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()
        if self._held is not None:
            self._held.close()

    def _listen(self) -> None:
        self._again = None
        asyncio.get_running_loop().add_reader(self._listening, self._take)

    def _take(self) -> None:
        for _ in range(_AT_ONCE):
            if not (serving := self._serving()):
                self._rest()
                return
            try:
                connection = self._held or self._listening.accept()[0]
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
        loop.remove_reader(self._listening)
        self._again = loop.call_later(_AGAIN_S, self._listen)


def _is_handed(connection: socket.socket, serving: Sequence[Link]) -> bool:
    """Hand a connection over. False where no worker takes it now: each has many that it has not taken yet."""
    for link in sorted(serving, key=lambda link: link.num_connections):
        with suppress(OSError):  # it has just ended, or takes none for the moment
            link.hand(connection)
            return True
    return False
