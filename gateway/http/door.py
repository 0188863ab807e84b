"""The gateway's own port: a deadline for a client that does not read, and JSON for a head that cannot be read."""

import asyncio
import contextlib
import resource
from ssl import SSLContext
from typing import Any

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from gateway.api import error_body
from gateway.http.json_body import reply

log = structlog.get_logger()

_KEEPALIVE_S = 900.0
WRITE_TIMEOUT_S = 60.0
_MOST_FILES, _FEW_FILES = 1 << 20, 16_384
_BACKLOG = 2048


class Door(web.BaseSite):
    """Listens for the clients of an application, with TLS where it has a context."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, context: SSLContext | None = None) -> None:
        super().__init__(runner, ssl_context=context, backlog=_BACKLOG)
        self._address = host, port

    @property
    def name(self) -> str:
        scheme = "https" if self._ssl_context else "http"
        return "{}://{}:{}".format(scheme, *self._address)

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connection, *self._address, ssl=self._ssl_context, backlog=self._backlog
        )

    def _connection(self) -> "Connection":
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        return Connection(self._runner.server, loop=loop, access_log=None, keepalive_timeout=_KEEPALIVE_S)


class Connection(RequestHandler):
    """One client's connection. It is closed where the client reads nothing for `WRITE_TIMEOUT_S` of a reply that fills
    the buffer."""

    __slots__ = ("_read_deadline",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_deadline: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self._has_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._has_read()
        super().resume_writing()

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

    def _await_reader(self) -> None:
        assert self.transport is not None
        unread = self.transport.get_write_buffer_size()
        self._read_deadline = asyncio.get_running_loop().call_later(WRITE_TIMEOUT_S, self._reader_is_late, unread)

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
        log.warning("a client does not read its reply and is cut off", seconds=WRITE_TIMEOUT_S)
        self.transport.abort()


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit: each client and each request to an engine needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY:
        return
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # beyond what the kernel allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft < _FEW_FILES:
        log.warning(
            "few open files are allowed: raise the hard limit (ulimit -Hn) above two for each rollout in flight",
            limit=soft,
        )
