"""Sends the chunks of a rollout as server-sent events.

Chunks are read ahead of the client: a client that stops reading blocks no engine and no weight update, and is cut off
after `gateway.write_timeout_s`.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

import structlog
from aiohttp import web

from engines.engine import Json
from engines.errors import RolloutGatewayError
from gateway.api import body_of, error_body
from gateway.dialects.parallel import read_ahead
from gateway.http.json_body import event
from gateway.http.replies.parted import parted, writing

log = structlog.get_logger()


_BLOCK_BYTES = 1 << 16  # so that a slow client has the time of one write for each


async def send_events(request: web.Request, chunks: AsyncGenerator[Json], write_timeout_s: float) -> web.StreamResponse:
    """The head is sent with the first chunk, so that an error before it keeps its status."""
    response = parted(request, {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    async def write(data: bytes, *, is_last: bool = False) -> None:
        async with writing(request, write_timeout_s):
            if not response.prepared:
                await response.prepare(request)
            await (response.write_eof if is_last else response.write)(data)

    try:
        async with aclosing(read_ahead([chunks])) as ahead:
            async for together in ahead:
                for block in _blocks(together):
                    await write(block)
    except RolloutGatewayError as error:
        if not response.prepared:
            raise
        await write(event(body_of(error)))
    except ConnectionError:
        raise  # the client is gone
    except Exception:
        if not response.prepared:
            raise
        log.exception("a stream failed in a way that was not foreseen", path=request.path)
        await write(event(error_body("the gateway failed; its log has the reason", 500)))
    await write(b"data: [DONE]\n\n", is_last=True)
    return response


def _blocks(chunks: Sequence[Json]) -> Iterator[bytes]:
    """Events in blocks of one write each; those before one that cannot be written too."""
    block = bytearray()
    try:
        for chunk in chunks:
            block += event(chunk)
            if len(block) >= _BLOCK_BYTES:
                yield bytes(block)
                block.clear()
    except Exception:
        yield bytes(block)
        raise
    if block:
        yield bytes(block)
