"""HTTP/1.1 to one server over kept connections, without the cost of a general client.

A rollout costs the gateway two HTTP messages, and little else: a general client takes as long as all of our own code.
So this is as much of the protocol as engines speak: no redirects, no cookies, no compression, no pipelining.
"""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Mapping
from types import TracebackType
from urllib.parse import quote, urlsplit

from engines.clients.connection import Connection

_BUFFER_BYTES = 1 << 16
_AS_IT_IS = "/?#[]@!$&'()*+,;=:%-._~"


class CannotConnect(ConnectionError):
    """No connection came about; `reason` is the system's error, or `TimeoutError`."""

    def __init__(self, address: str, reason: Exception) -> None:
        words = "it did not answer in time (timeout)" if isinstance(reason, TimeoutError) else str(reason)
        if isinstance(reason, ConnectionError) and reason.errno:
            words = os.strerror(reason.errno)  # "Connection refused", where asyncio says "Connect call failed"
        super().__init__(f"Cannot connect to {address}: {words}")
        self.reason = reason


class Connections:
    """The connections to one server; an idle one is kept for `keepalive_s`. There is no limit to their number."""

    def __init__(self, url: str, headers: Mapping[str, str], keepalive_s: float) -> None:
        address = urlsplit(url)
        # Made once: it reads the system's certificates.
        self._context = ssl.create_default_context() if address.scheme == "https" else None
        self._host, self._port = address.hostname or "", address.port or (443 if self._context else 80)
        self._address = address.netloc.rpartition("@")[2]
        self._fixed = _head_lines({"Host": self._address, "Accept": "*/*", "User-Agent": "rollout-gateway", **headers})
        self._keepalive_s = keepalive_s
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self.closed = False

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        self.closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        data: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float,
        connect_timeout_s: float,
    ) -> "Exchange":
        """Return the exchange as a block, whose value is the response. It takes at most `timeout_s`, from the begin of
        the block to the last byte that is read; then `TimeoutError` is raised where it waits for the server.

        Raises `CannotConnect`, and `ConnectionError` where the server breaks off or does not speak HTTP.
        """
        target = path if path.isascii() and path.isprintable() and " " not in path else quote(path, safe=_AS_IT_IS)
        length = "" if data is None else f"Content-Length: {len(data)}\r\n"
        head = f"{method} {target} HTTP/1.1\r\n{self._fixed}{length}{_head_lines(headers)}\r\n".encode("ascii")
        return Exchange(self, head, data or b"", timeout_s, connect_timeout_s)

    async def take(self, timeout_s: float) -> Connection:
        """Return an idle connection, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_ready:
                break
            connection.close()
        else:
            return await self.connected(timeout_s)
        self._busy.add(connection)
        return connection

    def give_back(self, connection: Connection, *, is_reusable: bool) -> None:
        self._busy.discard(connection)
        if is_reusable and not self.closed:
            self._idle.append(connection)
            connection.rest(self._keepalive_s)
        else:
            connection.close()

    def _drop(self, connection: Connection) -> None:
        """Forget an idle connection that the server has closed."""
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    async def connected(self, timeout_s: float) -> Connection:
        """Return a new connection."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self._buffer, self._drop), self._host, self._port, ssl=self._context
                )
        except (OSError, ssl.CertificateError) as error:
            raise CannotConnect(self._address, error) from error
        self._busy.add(connection)
        return connection


class Exchange:
    """One request and its response."""

    __slots__ = ("_body", "_connect_timeout_s", "_connection", "_connections", "_head", "_timeout_s")

    def __init__(
        self, connections: Connections, head: bytes, body: bytes, timeout_s: float, connect_timeout_s: float
    ) -> None:
        self._connections = connections
        self._head, self._body = head, body
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._connection: Connection | None = None

    async def __aenter__(self) -> Connection:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        try:
            connection = await self._connections.take(min(self._connect_timeout_s, self._timeout_s))
        except CannotConnect as error:
            # By the limits, as a timer may come a moment before its time.
            if isinstance(error.reason, TimeoutError) and self._timeout_s <= self._connect_timeout_s:
                raise TimeoutError from error
            raise
        try:
            await self._ask(connection, deadline)
        except ConnectionResetError:
            # The server closed a kept connection as the request was on its way. A GET may be sent again.
            if not (connection.was_kept and self._head.startswith(b"GET ")):
                raise
            connection = await self._connections.connected(min(self._connect_timeout_s, deadline - loop.time()))
            await self._ask(connection, deadline)
        return connection

    async def _ask(self, connection: Connection, deadline: float) -> None:
        """Send the request, and return when the response has begun."""
        self._connection = connection
        try:
            connection.send(self._head, self._body, deadline)
            await connection.head()
        except BaseException:
            self._connections.give_back(connection, is_reusable=False)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._connection is not None
        self._connections.give_back(self._connection, is_reusable=self._connection.finish())


def _head_lines(headers: Mapping[str, str]) -> str:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or not lines.isascii():
        raise ValueError(f"a header has a line end, or a character beyond ASCII: {', '.join(headers)}")
    return lines
