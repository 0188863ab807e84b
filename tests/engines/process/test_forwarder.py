"""The way to an engine that listens on loopback of another node."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from engines.clients.vllm_engine import VllmEngine
from engines.errors import EngineGone, EngineRefused
from engines.process.forwarder import Forwarder


class Server:
    """An engine, as far as its port goes."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.read())
        return web.Response(body=b"x" * int(request.query["size"]))


@asynccontextmanager
async def forwarded() -> AsyncIterator[tuple[Server, Forwarder, str, web.AppRunner]]:
    server = Server()
    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/answer", server.answer)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    forwarder = Forwarder(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield server, forwarder, await forwarder.open("127.0.0.1"), runner
    finally:
        await forwarder.close()
        await runner.cleanup()


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_what_is_asked_and_answered_arrives_whole() -> None:
    sent = bytes(range(256)) * 4_000
    async with (
        forwarded() as (server, forwarder, url, _),
        aiohttp.ClientSession(headers=bearing(forwarder.key)) as http,
    ):
        for _ in range(3):  # over one connection
            async with http.post(f"{url}/answer?size=3000000", data=sent) as response:
                assert await response.read() == b"x" * 3_000_000
        assert server.asked == [sent] * 3


@pytest.mark.parametrize("headers", [{}, bearing("wrong"), {"X-Authorization": "Bearer"}])
async def test_without_the_key_nothing_reaches_the_engine(headers: dict[str, str]) -> None:
    async with forwarded() as (server, _, url, _), aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{url}/answer?size=1") as response:
            assert response.status == 401
        assert server.asked == []


async def test_a_dead_engine_is_told_from_a_slow_one() -> None:
    async with forwarded() as (_, forwarder, url, runner):
        engine = VllmEngine("engine-0", url, api_key=forwarder.key)
        try:
            with pytest.raises(EngineRefused):
                await engine.health(5.0)  # this server has no such route, and says so
            await runner.cleanup()
            with pytest.raises(Exception, match="/health"):
                await engine.health(5.0)
            with pytest.raises(EngineGone):
                await engine.health(5.0)
        finally:
            await engine.close()
