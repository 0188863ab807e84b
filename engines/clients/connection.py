"""One connection to an HTTP/1.1 server. httptools (llhttp) reads what comes."""

import asyncio
from collections.abc import Callable
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

_LONGEST_HEAD = 1 << 16
_UNREAD_BYTES = 1 << 16
_SMALL_BODY = 1 << 16


class Connection(asyncio.BufferedProtocol):
    """One connection, and the response that is read from it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, buffer: memoryview, forget: Callable[["Connection"], None]
    ) -> None:
        """`forget` is called when the server closes the connection while it is idle.

        `buffer` takes what is received until it is parsed, at once, so connections of one loop may share it.
        """
        self._loop, self._buffer, self._forget = loop, buffer, forget
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._is_idle = True
        self.was_kept = False
        self._is_paused = False
        self._begin()

    def _begin(self) -> None:
        """Expect a response."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self._blocks: list[bytes] = []
        self._unread = 0
        self._head_bytes = 0
        self._keeps_alive = False
        self._ends_with_connection = False
        self._has_ended = False
        self._parser = HttpResponseParser(self)

    @property
    def is_open(self) -> bool:
        return self._error is None and self._transport is not None and not self._transport.is_closing()

    @property
    def is_ready(self) -> bool:
        """False where the server may have closed the connection, and nobody has seen it: after a standstill of this
        process its timer is late."""
        return self.is_open and self._timer is not None and self._loop.time() < self._timer.when()

    def send(self, head: bytes, body: bytes, deadline: float) -> None:
        """Send a request whose response is to be read until `deadline`, by the loop's clock."""
        assert self._transport is not None
        self._stop_timer()
        self._begin()
        self._is_idle = False
        self._timer = self._loop.call_at(deadline, self._expire)
        if len(body) < _SMALL_BODY:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    async def head(self) -> None:
        """Return when status and headers have come."""
        while not self.status:
            await self._more()

    async def read(self) -> bytes:
        """Return the body, or what is left of it."""
        blocks = []
        while block := await self.block():
            blocks.append(block)
        return b"".join(blocks)

    async def block(self) -> bytes:
        """Return all bytes of the body that are here, at least one; none at its end."""
        while not self._blocks:
            if self._has_ended:
                return b""
            await self._more()
        block = self._blocks[0] if len(self._blocks) == 1 else b"".join(self._blocks)
        self._blocks, self._unread = [], 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return block

    def finish(self) -> bool:
        """End the exchange. Return True if the connection can take another."""
        self._stop_timer()
        keeps = self._has_ended and not self._blocks and self.is_open
        return keeps and self.status < 500 and self._keeps_alive

    def rest(self, seconds: float) -> None:
        """Wait for the next request, and close after so many seconds without."""
        self._is_idle = self.was_kept = True
        self._timer = self._loop.call_later(seconds, self.close)

    def close(self) -> None:
        self._stop_timer()
        if self._error is None:
            self._fail(ConnectionAbortedError("the connection is closed"))
        if self._transport is not None:
            self._transport.abort()

    async def _more(self) -> None:
        """Return when something has come. Raise the error that ends the connection."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    def _expire(self) -> None:
        self._timer = None
        self._fail(TimeoutError())
        if self._transport is not None:
            self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._is_idle:
            self._forget(self)
        if exc is None and self.status and self._ends_with_connection:
            self._has_ended = True
        self._fail(ConnectionResetError(f"the server closed the connection{f': {exc}' if exc else ''}"))

    def eof_received(self) -> bool:
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_idle or self._has_ended:
            self._break_off("it sends bytes that belong to no response")
            return
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except (HttpParserError, HttpParserUpgrade) as error:
            self._break_off(f"it does not speak HTTP/1.1: {error}")
            return
        self._head_bytes += 0 if self.status else nbytes
        if self._head_bytes > _LONGEST_HEAD:
            self._break_off(f"it does not speak HTTP/1.1: its head has more than {_LONGEST_HEAD} bytes")
            return
        if self._unread > _UNREAD_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def _break_off(self, reason: str) -> None:
        self._fail(ConnectionError(reason))
        if self._transport is not None:
            self._transport.abort()

    # the parser's side

    def on_message_begin(self) -> None:
        if self._has_ended:
            raise ValueError("bytes follow the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if (status := self._parser.get_status_code()) < 200:  # such as 100 Continue
            self.headers = {}
            return
        self._keeps_alive = self._parser.should_keep_alive()
        self._ends_with_connection = self.headers.keys().isdisjoint(("content-length", "transfer-encoding"))
        self.status = status

    def on_body(self, body: bytes) -> None:
        self._blocks.append(body)
        self._unread += len(body)

    def on_message_complete(self) -> None:
        self._has_ended = self.status > 0
