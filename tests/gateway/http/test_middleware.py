"""What every reply passes: errors in the client's dialect."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from engines.errors import EngineFailed
from gateway.fleet.metrics import Metrics
from gateway.http.middleware import Measurement, note_begin


@pytest.mark.parametrize("error", [RuntimeError("unforeseen"), EngineFailed("foreseen")], ids=str)
async def test_a_reply_that_has_begun_is_cut_off_by_an_error(error: Exception) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        raise error

    app = web.Application(middlewares=[Measurement(Metrics()).measure])
    app.on_response_prepare.append(note_begin)
    app.router.add_get("/", stream)
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n")
        page = await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
    assert page.count(b"HTTP/1.1") == 1
    assert page.endswith(b"begun\r\n"), "no last chunk, so that the client sees the break"
