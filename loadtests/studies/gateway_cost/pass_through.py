"""A server that passes requests on to one engine as they are, with aiohttp on both sides: the least that a gateway in
Python costs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

_LARGEST_BODY = 1 << 30


class PassThrough:
    """Reads whole replies whole, and passes the parts of a stream on as they come."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body, headers = await request.read(), {"Content-Type": "application/json"}
        async with self._session.post(request.path, data=body, headers=headers) as response:
            if response.content_length is not None:
                content = await response.read()
                return web.Response(body=content, status=response.status, content_type=response.content_type)
            stream = web.StreamResponse(status=response.status, headers={"Content-Type": response.content_type})
            await stream.prepare(request)
            async for part in response.content.iter_any():
                await stream.write(part)
            return stream


@asynccontextmanager
async def serve(engine: str) -> AsyncIterator[str]:
    """Serve in front of `engine`."""
    async with aiohttp.ClientSession(engine, connector=aiohttp.TCPConnector(limit=0)) as session:
        app = web.Application(client_max_size=_LARGEST_BODY)
        app.router.add_post("/{path:.*}", PassThrough(session).handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0][:2])
        await runner.cleanup()
