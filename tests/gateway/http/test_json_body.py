"""Replies that are sent in pieces."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from engines.errors import EngineFailed
from gateway.fleet.metrics import Metrics
from gateway.http.json_body import send_pieces
from gateway.http.middleware import Measurement, note_begin


@pytest.mark.parametrize("error", [None, EngineFailed("no seal")], ids=str)
async def test_a_small_reply_begins_once_it_is_sealed(error: Exception | None) -> None:
    """A client on urllib3 asks again where a connection ends before a head, and fails where it ends within a reply."""
    waits, sealed = asyncio.Event(), asyncio.Event()

    async def seal() -> None:
        waits.set()
        await sealed.wait()
        if error is not None:
            raise error

    async def answer(request: web.Request) -> web.StreamResponse:
        return await send_pieces(request, [b"[", b"1]"], seal)

    app = web.Application(middlewares=[Measurement(Metrics()).measure])
    app.on_response_prepare.append(note_begin)
    app.router.add_get("/", answer)
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n")
        await asyncio.wait_for(waits.wait(), 10.0)
        heading = asyncio.create_task(reader.readexactly(12))
        begun, _ = await asyncio.wait([heading], timeout=0.2)
        sealed.set()
        page = await asyncio.wait_for(heading, 10.0) + await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
    assert not begun
    assert page.startswith(b"HTTP/1.1 502" if error else b"HTTP/1.1 200")
    assert error or page.endswith(b"\r\n\r\n[1]")
