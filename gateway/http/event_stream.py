"""Sends the chunks of a rollout as server-sent events.

Chunks are read ahead of the client: a client that stops reading blocks no engine and no weight update, and is cut off
after `gateway.write_timeout_s`.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
from aiohttp import web

from engines.engine import Json
from engines.errors import RolloutGatewayError
from gateway.api import body_of, error_body
from gateway.dialects.parallel import merged
from gateway.http.json_body import event
from gateway.http.request_id import HEADER, given_id

log = structlog.get_logger()


async def send_events(request: web.Request, chunks: AsyncGenerator[Json], write_timeout_s: float) -> web.StreamResponse:
    """The head is sent with the first chunk, so that an error before it keeps its status."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    if given := given_id(request):
        response.headers[HEADER] = given

    async def write(data: bytes) -> None:
        try:
            async with asyncio.timeout(write_timeout_s):
                if not response.prepared:
                    await response.prepare(request)
                await response.write(data)
        except TimeoutError:
            log.warning("a client does not read its stream and is cut off", seconds=write_timeout_s)
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client does not read") from None

    try:
        async with aclosing(merged([chunks])) as ahead:
            async for chunk in ahead:
                await write(event(chunk))
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
    await write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
