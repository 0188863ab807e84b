"""Bodies in, with errors that name the fault, and out: as JSON, whole or in pieces, and as server-sent events."""

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any

import aiohttp
import orjson
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engines.errors import BodyTooLarge, InvalidRequest, RolloutGatewayError
from engines.raw_json import encoded, event
from gateway.api import body_of, error_body
from gateway.dialects.streams import Streaming, blocks_of

log = structlog.get_logger()

_JSON = {"Content-Type": "application/json"}
_SMALL_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 18
_QUIET_TIMEOUT_S = 30.0  # between two parts of a body
_LARGEST_INFLATED = 64 << 20
_UNREADABLE = (web.HTTPBadRequest, web.RequestPayloadError, aiohttp.ClientError, HttpProcessingError)

BeforeEnd = Callable[[], Awaitable[None]]


async def read_object(request: web.Request, *, required: bool = True) -> dict[str, Any]:
    """Return the body as a JSON object; an empty body is `{}` unless it is `required`."""
    content = await read_content(request)
    return {} if not content and not required else as_object(content)


def as_object(content: bytes) -> dict[str, Any]:
    """Return a body as a JSON object."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, this is a {type(body).__name__}")
    return body


async def read_content(request: web.Request) -> bytes:
    """Return the body, decompressed. Raise `BodyTooLarge`, or `InvalidRequest` where it cannot be read."""
    limit = request.client_max_size
    if (request.content_length or 0) > limit:
        raise BodyTooLarge(_too_large(request.content_length or 0, limit))
    try:
        if request.content.is_eof() and "Content-Encoding" not in request.headers:
            content = request.content.read_nowait()
            if len(content) > limit:
                raise BodyTooLarge(_too_large(len(content), limit))
            return content
        return await _content(request, limit)
    except TimeoutError as error:
        raise InvalidRequest(f"the body stopped: no part of it came for {_QUIET_TIMEOUT_S:g} s") from error
    except _UNREADABLE as error:
        raise InvalidRequest(f"the body cannot be read: {error}") from error


async def _content(request: web.Request, limit: int) -> bytes:
    """Return the body, decompressed. A compressed body has a smaller limit, as it may inflate to a large size."""
    if "Content-Encoding" in request.headers:
        limit = min(limit, _LARGEST_INFLATED)
    blocks, size, clock = [], 0, asyncio.get_running_loop().time
    async with asyncio.timeout(_QUIET_TIMEOUT_S) as quiet:
        async for block in request.content.iter_any():
            quiet.reschedule(clock() + _QUIET_TIMEOUT_S)
            size += len(block)
            if size > limit:
                raise BodyTooLarge(_too_large(0, limit))
            blocks.append(block)
    return b"".join(blocks)


def reply(body: Any, status: int = 200) -> web.Response:
    """Return a JSON reply."""
    return web.Response(body=encoded(body), status=status, content_type="application/json")


def _too_large(size: int, limit: int) -> str:
    found = f"the body has {size} bytes" if size else "the body is longer"
    return f"{found} than gateway.max_body_bytes = {limit}: send fewer prompts at a time or raise the limit"


async def send_events(request: web.Request, work: Streaming) -> web.StreamResponse:
    """Send the chunks of a rollout as server-sent events. They are made ahead of the client: one that stops reading
    blocks no engine and no weight update.

    The head is sent with the first chunk, so that an error before it keeps its status.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        async with aclosing(blocks_of(work)) as ahead:
            async for together in ahead:
                for block in _blocks(map(event, together)):
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(block)
    except ConnectionError:
        raise  # the client is gone
    except Exception as error:
        if not response.prepared:
            raise
        if isinstance(error, RolloutGatewayError):
            body = body_of(error)
        else:
            log.exception("a stream failed in a way that was not foreseen", path=request.path)
            body = error_body("the gateway failed; its log has the reason", 500)
        await response.write(event(body))
    if not response.prepared:
        await response.prepare(request)
    await response.write_eof(b"data: [DONE]\n\n")
    return response


async def send_pieces(
    request: web.Request,
    pieces: Sequence[bytes],
    before_end: BeforeEnd | None = None,
    headers: Mapping[str, str] = _JSON,
) -> web.StreamResponse:
    """Send a reply in pieces, without a copy of the whole or a long turn of the loop. Return once it has left. Raise
    `ConnectionError` where the client is gone.

    `before_end` is awaited before the last piece, without which no client takes the reply for whole. A small reply has
    no head before: clients ask again where a connection ends without one, and fail where it ends later.
    """
    num_bytes = sum(map(len, pieces))
    if num_bytes < _SMALL_BYTES:
        pieces = [b"".join(pieces)]
    response = web.StreamResponse(headers=headers)
    response.content_length = num_bytes
    for block in _blocks(pieces[:-1]):
        await response.prepare(request)
        await response.write(block)
        await asyncio.sleep(0)  # a client that reads as fast as this writes would keep the loop
    if before_end is not None:
        await before_end()
    await response.prepare(request)
    await response.write_eof(pieces[-1])
    return response


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Pieces in blocks of about one size."""
    pieces, begin, num_sent = list(pieces), 0, 0
    ends = list(accumulate(map(len, pieces)))
    while begin < len(pieces):
        end = max(begin + 1, bisect_right(ends, num_sent + _BLOCK_BYTES))
        block = b"".join(pieces[begin:end])
        for place in range(0, len(block), _BLOCK_BYTES):
            yield block[place : place + _BLOCK_BYTES]
        begin, num_sent = end, ends[end - 1]
