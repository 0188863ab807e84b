"""HTTP/1.1 to one server over kept connections, without the cost of a general client. httptools (llhttp) reads.

A rollout costs the gateway two HTTP messages, and little else: a general client takes as long as all of our own code.
So this is as much of the protocol as engines speak: no redirects, no cookies, no compression, no pipelining.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import quote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

# A busy event loop, here or there, may take long to accept; probes find a dead host sooner.
_CONNECT_TIMEOUT_S = 30.0
_AS_IT_IS = "/?#[]@!$&'()*+,;=:%-._~"


class CannotConnect(ConnectionError):
    """No connection came about; `reason` is the system's error, or `TimeoutError`."""

    def __init__(self, address: str, reason: Exception) -> None:
        words = "it did not answer in time (timeout)" if isinstance(reason, TimeoutError) else str(reason)
        if isinstance(reason, ConnectionError) and reason.errno:
            words = os.strerror(reason.errno)  # "Connection refused", where asyncio says "Connect call failed"
        super().__init__(f"Cannot connect to {address}: {words}")
        self.reason = reason


class Connection(asyncio.Protocol):
    """One connection, and the response that is read from it."""

    _transport: asyncio.Transport

    def __init__(self, idle: dict["Connection", None]) -> None:
        """`idle` are the connections that wait for a request. One that the server closes leaves them."""
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.was_kept = False
        self._begin()

    def _begin(self) -> None:
        """Expect a response."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self._blocks: list[bytes] = []
        self._is_kept_alive = False
        self._has_ended = False
        self._parser = HttpResponseParser(self)

    @property
    def is_open(self) -> bool:
        return self._error is None and not self._transport.is_closing()

    @property
    def is_ready(self) -> bool:
        """False where the server may have closed the connection, and nobody has seen it: after a standstill of this
        process its timer is late."""
        return self.is_open and self._timer is not None and self._loop.time() < self._timer.when()

    @property
    def is_reusable(self) -> bool:
        """True if it can take another request."""
        return self.is_open and self._has_ended and self._is_kept_alive and self.status < 500

    async def ask(self, request: bytes, deadline: float) -> None:
        """Send a request whose response is to be read until `deadline`, by the loop's clock. Return when status and
        headers have come."""
        self._begin()
        self._end_at(deadline, TimeoutError())
        self._transport.write(request)
        while not self.status:
            await self._more()

    async def read(self) -> bytes:
        """Return the body, or what is left of it."""
        while not self._has_ended:
            await self._more()
        return await self.block()

    async def block(self) -> bytes:
        """Return all bytes of the body that are here, at least one; none at its end."""
        while not (self._blocks or self._has_ended):
            await self._more()
        block, self._blocks = b"".join(self._blocks), []
        return block

    def rest(self, seconds: float) -> None:
        """Wait for the next request, and close after so many seconds without."""
        self.was_kept = True
        self._end_at(self._loop.time() + seconds, ConnectionAbortedError("the connection was idle"))

    def close(self, error: Exception | None = None) -> None:
        """End it. Who waits for its response gets the first error."""
        self._fail(error or ConnectionAbortedError("the connection is closed"))
        self._transport.abort()

    def _end_at(self, deadline: float, error: Exception) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self.close, error)

    async def _more(self) -> None:
        """Return when something has come. Raise the error that ends the connection."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._error = self._error or error
        self._wake()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.pop(self, None)
        if exc is None and self._error is None and self.status:  # a body without length or chunks, as of some proxies
            self._has_ended |= self.headers.keys().isdisjoint(("content-length", "transfer-encoding"))
        self._fail(ConnectionResetError(f"the server closed the connection{f': {exc}' if exc else ''}"))

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            self.close(ConnectionError("it sends bytes that belong to no response"))
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.close(ConnectionError(f"it does not speak HTTP/1.1: {error}"))
        self._wake()

    # the parser's side

    def on_message_begin(self) -> None:
        if self._has_ended:
            raise ValueError("bytes follow the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status, self._is_kept_alive = self._parser.get_status_code(), self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._blocks.append(body)

    def on_message_complete(self) -> None:
        self._has_ended = True


class Connections:
    """The connections to one server; an idle one is kept for `keepalive_s`. There is no limit to their number."""

    def __init__(self, url: str, headers: Mapping[str, str], keepalive_s: float) -> None:
        address = urlsplit(url)
        # Made once: it reads the system's certificates.
        self._context = ssl.create_default_context() if address.scheme == "https" else None
        self._host, self._port = address.hostname or "", address.port or (443 if self._context else 80)
        self._address = address.netloc.rpartition("@")[2]
        self._headers = {"Host": self._address, "Accept": "*/*", "User-Agent": "rollout-gateway", **headers}
        self._keepalive_s = keepalive_s
        self._idle: dict[Connection, None] = {}
        self._busy: set[Connection] = set()
        self.closed = False

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        self.closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()

    @asynccontextmanager
    async def request(
        self, method: str, path: str, *, data: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> AsyncIterator[Connection]:
        """Ask, with the response as the block's value. It takes at most `timeout_s`, from the begin of the block to the
        last byte that is read; then `TimeoutError` is raised where it waits for the server.

        Raises `CannotConnect`, and `ConnectionError` where the server breaks off or does not speak HTTP.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        request = self._written(method, path, data, headers)
        connection = self._kept() or await self._connected(deadline)
        try:
            try:
                await connection.ask(request, deadline)
            except ConnectionResetError:
                # The server closed a kept connection as the request was on its way. A GET may be sent again.
                if not (connection.was_kept and method == "GET"):
                    raise
                self._give_back(connection)
                connection = await self._connected(deadline)
                await connection.ask(request, deadline)
            yield connection
        finally:
            self._give_back(connection)

    def _written(self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]) -> bytes:
        lines = [f"{name}: {value}\r\n" for name, value in {**self._headers, **headers}.items()]
        if data is not None:
            lines.append(f"Content-Length: {len(data)}\r\n")
        head = f"{method} {quote(path, safe=_AS_IT_IS)} HTTP/1.1\r\n{''.join(lines)}\r\n"
        return head.encode("ascii") + (data or b"")

    def _kept(self) -> Connection | None:
        """Return an idle connection, the one that was used last; None without one."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_ready:
                self._busy.add(connection)
                return connection
            connection.close()
        return None

    async def _connected(self, deadline: float) -> Connection:
        """Return a new connection."""
        loop = asyncio.get_running_loop()
        limit = min(deadline, loop.time() + _CONNECT_TIMEOUT_S)
        try:
            async with asyncio.timeout_at(limit):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._idle), self._host, self._port, ssl=self._context
                )
        except OSError as error:
            if isinstance(error, TimeoutError) and limit == deadline:
                raise
            raise CannotConnect(self._address, error) from error
        self._busy.add(connection)
        return connection

    def _give_back(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if connection.is_reusable and not self.closed:
            self._idle[connection] = None
            connection.rest(self._keepalive_s)
        else:
            connection.close()
