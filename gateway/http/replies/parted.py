"""What all bodies that are sent in parts share: the head, and the bound on a client that does not read."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import structlog
from aiohttp import web

from gateway.http.request_id import HEADER, given_id

log = structlog.get_logger()


def parted(request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
    """Return a response that is sent in parts, with the request's id where its client gave one."""
    response = web.StreamResponse(headers=headers)
    name(response, request)
    return response


def name(response: web.StreamResponse, request: web.Request) -> None:
    """Give a response the request's id, where its client gave one."""
    if given := given_id(request):
        response.headers[HEADER] = given


@asynccontextmanager
async def writing(request: web.Request, write_timeout_s: float) -> AsyncIterator[None]:
    """Cut a client off that does not read the writes of the block in time. Raise `ConnectionResetError` then."""
    try:
        async with asyncio.timeout(write_timeout_s):
            yield
    except TimeoutError:
        log.warning("a client does not read its stream and is cut off", seconds=write_timeout_s)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read") from None
