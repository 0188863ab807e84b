"""The gateway's own port: deadlines for the head of each request and for a client that does not read, and JSON for a
head that cannot be read."""

import asyncio
from ssl import SSLContext
from typing import Any

import structlog
from aiohttp import StreamReader, web
from aiohttp.web_protocol import RequestHandler

from gateway.api import error_body
from gateway.http.json_body import reply

log = structlog.get_logger()

_HEAD_TIMEOUT_S = 30.0
# A timer so late shows that this process stood still, and may not have read heads that have arrived.
_OWN_DELAY_S = 1.0
_KEEPALIVE_S = 900.0
BACKLOG = 2048


class Door(web.BaseSite):
    """Listens for the clients of an application, with TLS where it has a context."""

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, context: SSLContext | None = None, *, write_timeout_s: float
    ) -> None:
        super().__init__(runner, ssl_context=context, backlog=BACKLOG)
        self._address = host, port
        self._write_timeout_s = write_timeout_s

    @property
    def name(self) -> str:
        scheme = "https" if self._ssl_context else "http"
        return "{}://{}:{}".format(scheme, *self._address)

    async def start(self) -> None:
        await super().start()
        self._server = await self._open()

    async def _open(self) -> asyncio.AbstractServer:
        loop = asyncio.get_running_loop()
        return await loop.create_server(self._connection, *self._address, ssl=self._ssl_context, backlog=self._backlog)

    def _connection(self) -> "Connection":
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        return Connection(
            self._runner.server,
            loop=loop,
            access_log=None,
            keepalive_timeout=_KEEPALIVE_S,
            write_timeout_s=self._write_timeout_s,
        )


class Connection(RequestHandler):
    """One client's connection. It is closed where the first head, or a later one that has begun, is late, and where the
    client reads nothing for `write_timeout_s` of a reply that fills the buffer."""

    __slots__ = ("_body", "_head_deadline", "_read_deadline", "_write_timeout_s")

    def __init__(self, *args: Any, write_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write_timeout_s = write_timeout_s
        self._read_deadline: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None
        self._head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_arrived()
        self._has_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._has_read()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        known, is_between = self._request_count, self._body is None or self._body.is_eof()
        super().data_received(data)
        if self._request_count > known:
            self._body = self._messages[-1][1]
            self._head_arrived()
        elif data and is_between and self._head_deadline is None:  # aiohttp itself feeds no bytes, to go on
            self._await_head()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a head that cannot be read, and failures outside of the application."""
        if status >= 500:
            self.log_exception("Error handling request from %s", request.remote, exc_info=exc)
        else:
            # Without the message, which repeats lines of the head: these may have a key.
            log.info("a request cannot be read", peer=request.remote, status=status, error=type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("part of another response is sent already")
        response = reply(error_body(f"the request cannot be read: {message or exc}", status), status)
        response.force_close()
        return response

    def _await_head(self) -> None:
        due = asyncio.get_running_loop().time() + _HEAD_TIMEOUT_S
        self._head_deadline = asyncio.get_running_loop().call_at(due, self._head_is_late, due)

    def _head_arrived(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _head_is_late(self, due: float) -> None:
        self._head_deadline = None
        stood_still = asyncio.get_running_loop().time() - due > _OWN_DELAY_S
        if self._request_in_progress or stood_still:
            self._await_head()  # one that came early has its time from the end of the request before it
        else:
            self.force_close()

    def _await_reader(self) -> None:
        assert self.transport is not None
        unread = self.transport.get_write_buffer_size()
        self._read_deadline = asyncio.get_running_loop().call_later(self._write_timeout_s, self._reader_is_late, unread)

    def _has_read(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None

    def _reader_is_late(self, unread: int) -> None:
        """Close the connection unless the client has read some of the `unread` bytes, however slowly."""
        assert self.transport is not None
        if self.transport.get_write_buffer_size() < unread:
            self._await_reader()
            return
        self._read_deadline = None
        log.warning("a client does not read its reply and is cut off", seconds=self._write_timeout_s)
        self.transport.abort()
