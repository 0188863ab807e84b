"""What an engine's client expects of aiohttp, through real sockets."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from engines.clients import http
from engines.clients.vllm_engine import VllmEngine
from engines.errors import DeadlineExceeded, EngineUnreachable

TIMEOUT_S = 20.0
BODY = b'{"choices": [1, 2, 3]}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def client_of(serve: Serve) -> AsyncIterator[VllmEngine]:
    """Of a server that runs `serve` for each connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except ConnectionError:
            return  # the client has closed
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    engine = VllmEngine("r1", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield engine
    finally:
        await engine.close()
        server.close()
        await server.wait_closed()


async def _request(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def numbering() -> Serve:
    """Answers with the number of the connection."""
    number = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        number += 1
        while await _request(reader):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number)

    return answer


async def test_a_connection_is_used_again() -> None:
    async with client_of(numbering()) as engine:
        assert [await engine.read("GET", "/x", None, TIMEOUT_S) for _ in range(2)] == [b"1", b"1"]


async def test_a_connection_that_was_idle_for_too_long_is_not_used_though_its_timer_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A standstill of the process: the server has closed the connection meanwhile, and nobody has read that."""
    monkeypatch.setattr(http, "_KEEPALIVE_S", 0.05)
    async with client_of(numbering()) as engine:
        assert await engine.read("GET", "/x", None, TIMEOUT_S) == b"1"
        time.sleep(0.1)  # noqa: ASYNC251
        assert await engine.read("GET", "/x", None, TIMEOUT_S) == b"2"


async def test_a_post_that_a_kept_connection_breaks_under_is_not_sent_again() -> None:
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while await _request(reader):
            asked += 1
            if asked > 1:
                return
            writer.write(ANSWER)

    async with client_of(serve) as engine:
        await engine.read("POST", "/x", None, TIMEOUT_S)
        with pytest.raises(EngineUnreachable):
            await engine.read("POST", "/x", None, TIMEOUT_S)
    assert asked == 2


@pytest.mark.parametrize("time_left_s", [0.05, 0.0, -1.0])
async def test_a_late_answer_does_not_reach_the_next_request(time_left_s: float) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _request(reader):
            if b"/late" not in head:
                writer.write(ANSWER)

    async with client_of(serve) as engine:
        with pytest.raises(DeadlineExceeded, match="no answer to /late"):
            await engine.read("GET", "/late", None, time_left_s)
        assert await engine.read("GET", "/x", None, TIMEOUT_S) == BODY


@pytest.mark.parametrize(
    "answer", [ANSWER[:30], ANSWER[:-1], b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000]
)
async def test_an_answer_that_ends_early_or_is_no_http_is_of_an_engine_out_of_reach(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(answer)

    async with client_of(serve) as engine:
        with pytest.raises(EngineUnreachable):
            await engine.read("GET", "/x", None, TIMEOUT_S)


async def test_a_large_body_arrives_whole() -> None:
    heard = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await _request(reader)
        heard.append(await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])))
        writer.write(ANSWER)

    body = bytes(3 << 20)
    async with client_of(serve) as engine:
        assert await engine.read("POST", "/x", body, TIMEOUT_S) == BODY
    assert heard == [body]


async def test_a_reader_that_does_not_read_holds_the_server_back() -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await _request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (256 << 20))
        for _ in range(256):
            writer.write(bytes(1 << 20))
            await writer.drain()
            sent += 1

    async with client_of(serve) as engine, engine._request("GET", "/", None, TIMEOUT_S) as response:
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 64
        assert len(await response.read()) == 256 << 20


async def test_a_path_cannot_smuggle_a_request() -> None:
    paths = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _request(reader):
            paths.append(head.split(b"\r\n")[0])
            writer.write(ANSWER)

    async with client_of(serve) as engine:
        await engine.read("GET", "/a b\r\nX: 1?q=é", None, TIMEOUT_S)
    assert paths == [b"GET /a%20bX:%201?q=%C3%A9 HTTP/1.1"]
