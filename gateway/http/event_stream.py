"""Sends the chunks of a rollout as server-sent events."""

from collections.abc import AsyncGenerator

from aiohttp import web

from engines.engine import Json
from engines.errors import RolloutGatewayError
from gateway.api import body_of
from gateway.http.json_body import event
from gateway.http.request_id import HEADER


async def send_events(request: web.Request, chunks: AsyncGenerator[Json]) -> web.StreamResponse:
    """The head is sent with the first chunk, so that an error before it keeps its status."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    if HEADER in request.headers:
        response.headers[HEADER] = request.headers[HEADER]
    try:
        async for chunk in chunks:
            if not response.prepared:
                await response.prepare(request)
            await response.write(event(chunk))
    except RolloutGatewayError as error:
        if not response.prepared:
            raise
        await response.write(event(body_of(error)))
    finally:
        await chunks.aclose()
    if not response.prepared:
        await response.prepare(request)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
