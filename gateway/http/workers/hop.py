"""Requests that one process of the gateway sends on to another, over doors that this user alone can open.

The other process sees the client's own address and checks its key as if the client had come to it.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import ContextVar
from functools import partial
from pathlib import Path

import aiohttp
import structlog
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from gateway.api import error_body
from gateway.http.access import Handler
from gateway.http.door import LEASE_PATH, notice_lost_host
from gateway.http.json_body import reply as json_reply
from gateway.http.middleware import HANDED_ON

log = structlog.get_logger()

_Asked = AbstractAsyncContextManager[aiohttp.ClientResponse]

HEADER = "X-Rollout-Gateway-Hop"
OWNER = "owner"
"""Name of the owner's door; a worker's is its number."""

_CONNECT_TIMEOUT_S = 10.0
_CONNECTS, _CONNECT_AGAIN_S = 240, 0.25
_GONE = 499
# They are of one connection, and not of the request or the reply.
_OF_CONNECTIONS = (
    hdrs.CONNECTION, hdrs.KEEP_ALIVE, hdrs.TRANSFER_ENCODING, hdrs.TE, hdrs.TRAILER, hdrs.UPGRADE,
    hdrs.PROXY_AUTHENTICATE, hdrs.PROXY_AUTHORIZATION, hdrs.EXPECT, HEADER,
)  # fmt: skip


class RunsElsewhere(Exception):
    """A request that another process has to answer: a worker, or else the owner. `content` is its body, if it was read.

    Caught by `Hops` alone, before it becomes an error of the client's.
    """

    def __init__(self, content: bytes | None = None, worker: int | None = None) -> None:
        super().__init__()
        self.content = content
        self.door = OWNER if worker is None else str(worker)


def door_path(folder: Path, door: str) -> str:
    return str(folder / f"{door}.sock")


IS_SENT_ON: ContextVar[bool] = ContextVar("IS_SENT_ON", default=False)
"""True for a request that another process has sent on: this one answers it in any case."""


@web.middleware
async def as_sent(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Show a request that came over a hop as its client has sent it. For doors between the processes alone."""
    IS_SENT_ON.set(True)
    peer, _, scheme = request.headers.get(HEADER, "").partition(" ")
    return await handler(request.clone(remote=peer, scheme=scheme or "http"))


class Hops:
    """Sends requests on to the other processes, and their replies back as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    @web.middleware
    async def other_routes(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Send requests on for which this process has no route."""
        if request.match_info.http_exception is None:
            return await handler(request)
        return await self.send(request, RunsElsewhere())

    @web.middleware
    async def other_requests(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Send requests on that their handler leaves to another process."""
        try:
            return await handler(request)
        except RunsElsewhere as elsewhere:
            request[HANDED_ON] = True
            return await self.send(request, elsewhere)

    async def send(self, request: web.Request, elsewhere: RunsElsewhere) -> web.StreamResponse:
        """Send a request on, and pass the reply to its client. Where the other process ends, so does the client's
        connection, as if it had been connected there."""
        headers = _kept(request.headers)
        headers[HEADER] = f"{request.remote or ''} {request.scheme}"
        headers[hdrs.HOST] = request.host  # of a request that names a whole URL the host is there
        if request.path == LEASE_PATH:
            notice_lost_host(request)  # the connection of its trainer is here
        content = elsewhere.content
        if content is not None or hdrs.CONTENT_ENCODING in headers:  # it was inflated
            headers.popall(hdrs.CONTENT_LENGTH, None)
            headers.popall(hdrs.CONTENT_ENCODING, None)
        data = content if content is not None else request.content if request.can_read_body else None
        ask = partial(
            self._session(elsewhere.door).request,
            request.method, _url_of(request.rel_url), headers=headers, data=data, allow_redirects=False,
        )  # fmt: skip
        try:
            async with AsyncExitStack() as stack:
                return await self._pass(request, await _answer(ask, stack))
        except aiohttp.ClientError as error:
            if (unread := request.content.exception()) is not None:
                return json_reply(error_body(f"the body cannot be read: {unread}", 400), 400)
            log.warning("a request is lost with the process that had it", door=elsewhere.door, error=repr(error))
            if request.transport is not None:
                request.transport.close()
            return web.Response(status=_GONE)

    async def _pass(self, request: web.Request, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=reply.status, reason=reply.reason, headers=_kept(reply.headers))
        await response.prepare(request)
        async for block in reply.content.iter_any():
            await response.write(block)
        await response.write_eof()
        return response

    def _session(self, door: str) -> aiohttp.ClientSession:
        session = self._sessions.get(door)
        if session is None:
            session = self._sessions[door] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(door_path(self._folder, door), limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(loop=asyncio.get_running_loop()),
                skip_auto_headers=(hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.USER_AGENT, hdrs.CONTENT_TYPE),
            )
        return session


async def _answer(ask: Callable[[], _Asked], stack: AsyncExitStack) -> aiohttp.ClientResponse:
    """Ask, and again where so many wait at the door that it takes no connection for the moment: TCP would wait too."""
    connects = 1
    while True:
        try:
            return await stack.enter_async_context(ask())
        except aiohttp.ClientConnectorError as error:
            if connects == _CONNECTS or not isinstance(error.os_error, BlockingIOError):
                raise
        connects += 1
        await asyncio.sleep(_CONNECT_AGAIN_S)


def _url_of(asked: URL) -> URL:
    """The path and query as they were sent, behind a name that says nothing: the door leads to one process."""
    return URL.build(
        scheme="http", host="gateway", path=asked.raw_path, query_string=asked.raw_query_string, encoded=True
    )


def _kept(headers: Mapping[str, str]) -> CIMultiDict[str]:
    kept: CIMultiDict[str] = CIMultiDict(headers)
    for name in _OF_CONNECTIONS:
        kept.popall(name, None)
    return kept
