"""Reports on servers that are slow, fail or stay silent."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from tests.loadtests.locust_runs import locust

pytestmark = pytest.mark.load

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """A server of our own in the place of a gateway."""
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def chunk(tokens: int, finish: str | None = None) -> bytes:
    return (
        b"data: "
        + orjson.dumps({"choices": [{"index": 0, "token_ids": [9] * tokens, "finish_reason": finish}]})
        + b"\n\n"
    )


async def streamed(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def test_waiting_counts_from_when_a_request_was_due(tmp_path: Path) -> None:
    """One answer at a time, 0.2 s each, to 20 requests a second: the queue, and with it the wait, only grows."""
    turn = asyncio.Lock()

    async def slow(request: web.Request) -> web.StreamResponse:
        async with turn:
            await asyncio.sleep(0.2)
        response = await streamed(request)
        await response.write(chunk(6, "length") + b"data: [DONE]\n\n")
        return response

    async with server(slow) as url:
        ended = await locust("open_loop", url, tmp_path, "-t", "2s", "--rate", "20")
    assert ended.has_passed, ended.said
    assert ended.figures["completions"] > 20
    assert ended.figures["ttft_s.p99"] > 2.0
    assert ended.figures["lateness_s.p50"] < ended.figures["ttft_s.p50"]


async def test_a_reply_that_breaks_off_is_a_failure(tmp_path: Path) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        response = await streamed(request)
        await response.write(chunk(3))
        assert request.transport is not None
        request.transport.abort()
        return response

    async with server(broken) as url:
        ended = await locust("trainer", url, tmp_path, "-t", "1s", "--prompts", "1", "--samples", "1")
    assert ended.code == 1
    assert ended.figures["failures"] > 0
    assert ended.figures["completions"] == 0


async def test_a_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        response = await streamed(request)
        await response.write(chunk(3))
        await asyncio.sleep(60)
        return response

    async with server(silent) as url:
        options = ["-t", "1s", "--prompts", "1", "--samples", "1", "--request-timeout", "0.5"]
        ended = await locust("trainer", url, tmp_path, *options)
    assert ended.code == 1
    assert "no complete reply within 0.5 s (--request-timeout)" in ended.said
    assert ended.figures["failed_s.p50"] < 5
