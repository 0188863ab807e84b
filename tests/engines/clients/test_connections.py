"""HTTP as servers write it, cut anywhere, through real sockets."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from engines.clients.connections import Connections

TIMEOUT_S = 20.0
BODY = b'{"choices": [1, 2, 3]}'
CHUNKED = b"7;name=value\r\n" + BODY[:7] + b"\r\n" + b"%X\r\n" % len(BODY[7:]) + BODY[7:] + b"\r\n0\r\n\r\n"
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED
UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nServer: nginx\r\nConnection: close\r\n\r\n" + BODY
TRAILED = STREAM[:-2] + b"Digest: abc\r\n\r\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def connections(serve: Serve, keepalive_s: float = 4.0) -> AsyncIterator[Connections]:
    """To a server that runs `serve` for each connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except ConnectionError:
            return  # the client has closed
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    found = Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, keepalive_s=keepalive_s)
    try:
        yield found
    finally:
        await found.close()
        server.close()
        await server.wait_closed()


def answering(answer: bytes, *, cuts: tuple[int, ...] = (), closes: bool = False) -> Serve:
    """Answers each request with these bytes, in parts that are cut at `cuts`."""

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await _request(reader):
            for begin, end in zip((0, *cuts), (*cuts, len(answer)), strict=True):
                writer.write(answer[begin:end])
                await writer.drain()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            if closes:
                return

    return answer_all


async def _request(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


async def get(found: Connections, path: str = "/x") -> tuple[int, bytes]:
    async with found.request("GET", path, data=None, headers={}, timeout_s=TIMEOUT_S) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("answer", [LENGTH, STREAM, TRAILED], ids=["length", "chunks", "trailer"])
async def test_an_answer_may_come_byte_by_byte_and_the_connection_is_used_again(answer: bytes) -> None:
    async with connections(answering(answer, cuts=tuple(range(1, len(answer))))) as found:
        assert [await get(found) for _ in range(2)] == [(200, BODY)] * 2
        assert len(found._idle) == 1


async def test_a_kept_connection_holds_no_answer() -> None:
    async with connections(answering(LENGTH)) as found:
        await get(found)
        assert [connection._blocks for connection in found._idle] == [[]]


async def test_a_body_may_end_with_its_connection_and_not_with_the_time_for_it() -> None:
    """nginx with `chunked_transfer_encoding off`, as is advised for streams, sends SGLang's /metrics so."""
    async with connections(answering(UNTIL_CLOSED, cuts=(60,), closes=True)) as found:
        assert await get(found) == (200, BODY)
        assert not found._idle
    async with (
        connections(answering(UNTIL_CLOSED)) as found,
        found.request("GET", "/", data=None, headers={}, timeout_s=0.05) as response,
    ):
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            await response.read()


@pytest.mark.parametrize("answer", [LENGTH, STREAM], ids=["length", "chunks"])
async def test_an_answer_that_ends_early_is_an_error(answer: bytes) -> None:
    for end in range(1, len(answer)):
        async with connections(answering(answer[:end], closes=True)) as found:
            with pytest.raises(ConnectionError, match="closed the connection"):
                await get(found)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n0123456789",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
    ],
)
async def test_bytes_that_are_no_http_are_an_error_and_end_the_connection(answer: bytes) -> None:
    async with connections(answering(answer)) as found:
        with pytest.raises(ConnectionError, match="HTTP"):
            await get(found)
        assert not found._idle


@pytest.mark.parametrize("answer", [STREAM + b"0", LENGTH + b"0", LENGTH + LENGTH, LENGTH + b"HTTP/1.1 200 OK\r\n"])
async def test_a_connection_with_bytes_behind_the_answer_is_not_used_again(answer: bytes) -> None:
    async with connections(answering(answer)) as found:
        assert await get(found) == (200, BODY)
        assert not found._idle


async def test_a_late_answer_does_not_reach_the_next_request() -> None:
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while await _request(reader):
            asked += 1
            if asked > 1:
                writer.write(LENGTH)

    async with connections(serve) as found:
        with pytest.raises(TimeoutError):
            async with found.request("GET", "/", data=None, headers={}, timeout_s=0.05):
                pass
        assert await get(found) == (200, BODY)
        assert not found._busy


async def test_a_connection_that_was_idle_for_too_long_is_not_used_though_its_timer_is_late() -> None:
    """A standstill of the process: the server has closed the connection meanwhile, and nobody has read that."""
    number = 0

    async def answer_with_number(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        number += 1
        while await _request(reader):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number)

    async with connections(answer_with_number, keepalive_s=0.05) as found:
        assert await get(found) == (200, b"1")
        time.sleep(0.1)  # noqa: ASYNC251
        assert await get(found) == (200, b"2")


async def test_a_path_cannot_smuggle_a_request() -> None:
    paths = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _request(reader):
            paths.append(head.split(b"\r\n")[0])
            writer.write(LENGTH)

    async with connections(serve) as found:
        await get(found, "/a b\r\nX: 1?q=é")
    assert paths == [b"GET /a%20b%0D%0AX:%201?q=%C3%A9 HTTP/1.1"]
