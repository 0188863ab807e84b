"""Replies that are sent in parts: streams of events, and bodies of any size. A client that does not read is cut off by
its connection."""

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from itertools import accumulate

import structlog
from aiohttp import web

from engines.errors import RolloutGatewayError
from engines.raw_json import event
from gateway.api import body_of, error_body
from gateway.dialects.streams import Streaming, blocks_of

log = structlog.get_logger()

_JSON = {"Content-Type": "application/json"}
_SMALL_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 18

BeforeEnd = Callable[[], Awaitable[None]]


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
    request: web.Request, pieces: Sequence[bytes], before_end: BeforeEnd | None = None
) -> web.StreamResponse:
    """Send JSON in pieces, without a copy of the whole or a long turn of the loop. Return once it has left. Raise
    `ConnectionError` where the client is gone.

    `before_end` is awaited before the last piece, without which no client takes the reply for whole.
    """
    response: web.StreamResponse
    num_bytes, last = sum(map(len, pieces)), b""
    if num_bytes < _SMALL_BYTES:
        if before_end is not None:
            await before_end()
        response = web.Response(body=b"".join(pieces), headers=_JSON)
        await response.prepare(request)
    else:
        response, last = web.StreamResponse(headers=_JSON), pieces[-1]
        response.content_length = num_bytes
        await response.prepare(request)
        for block in _blocks(pieces[:-1]):
            await response.write(block)
            await asyncio.sleep(0)  # a client that reads as fast as this writes would keep the loop
        if before_end is not None:
            await before_end()
    await response.write_eof(last)
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
