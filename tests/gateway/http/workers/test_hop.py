"""Requests that are sent on to another process wait for it, as they would at its own port."""

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import uvloop

from gateway.http.workers.hop import _answer


@pytest.fixture
def door() -> Iterator[Path]:
    """A path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder) / "door.sock"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if await reader.read(1):
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
    writer.close()


def _filled(door: Path) -> list[socket.socket]:
    """Connect to a door until it takes no further connection."""
    waiting: list[socket.socket] = []
    with suppress(BlockingIOError):
        while True:
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            waiting[-1].connect(str(door))
    return waiting


def test_a_request_waits_while_so_many_wait_at_a_door_that_it_takes_no_connection(door: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the gateway's: asyncio's has another error
        runner.run(_ask_at_a_full_door(door))


async def _ask_at_a_full_door(door: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(door))
    listening.listen(1)
    waiting = _filled(door)
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(door))) as client, AsyncExitStack() as stack:
        asking = asyncio.create_task(_answer(partial(client.get, "http://gateway/"), stack))
        await asyncio.sleep(0.05)
        assert not asking.done()
        async with await asyncio.start_unix_server(_serve, sock=listening), asyncio.timeout(20):
            assert (await asking).status == 204
        for one in waiting:
            one.close()


async def test_a_door_that_nobody_opens_is_an_error_at_once(door: Path) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(door))) as client, AsyncExitStack() as stack:
        with pytest.raises(aiohttp.ClientConnectorError):
            await _answer(partial(client.get, "http://gateway/"), stack)
