"""A reader beside an engine and a gateway's link to it, over real sockets; the engine is a list of chunks."""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from engines.chunks import Chunk
from engines.clients.vllm_engine import VllmEngine
from engines.config import SimConfig
from engines.engine import Engine, Json
from engines.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineGone,
    EngineRefused,
    EngineUnreachable,
    RolloutGatewayError,
)
from engines.raw_json import decoded
from engines.reading.link import Link
from engines.reading.server import ReaderServer
from engines.reading.wire import Answer
from tests.rigs.rig import SimReplica

KEY = "a key"
TIMEOUT_S = 20.0
BEATS_S = 0.02
NEVER_S = 1000.0


def event(token: int, end: str = "null") -> bytes:
    return b'{"id":"a","choices":[{"index":0,"text":"t","token_ids":[%d],"finish_reason":%s}]}' % (token, end.encode())


class PlayedEngine:
    """Yields events, waits where it is told to, and ends with an error if it has one."""

    replica_id = "engine-0"

    def __init__(self, *events: bytes, error: RolloutGatewayError | None = None, waits: bool = False) -> None:
        self._events, self._error, self._waits = events, error, waits
        self.asked: list[tuple[str, Json, float]] = []
        self.ended = asyncio.Event()

    async def events(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[list[bytes]]:
        self.asked.append((path, body, timeout_s))
        try:
            for one in self._events:
                yield [one]
            if self._waits:
                await asyncio.Event().wait()
            if self._error is not None:
                raise self._error
        finally:
            self.ended.set()

    async def close(self) -> None:
        pass


@asynccontextmanager
async def linked(engine: PlayedEngine, *, key: str = KEY, every_s: float = BEATS_S) -> AsyncIterator[Link]:
    server = ReaderServer(cast(Engine, engine), KEY, every_s=every_s)
    link = Link(engine.replica_id, await server.open("127.0.0.1"), key)
    try:
        yield link
    finally:
        await link.close()
        await server.close()


async def read(link: Link, *, streams: bool, heard: Callable[[], Any] = lambda: None) -> list[list[int]]:
    """The tokens of each chunk."""
    found = []

    def take(chunks: list[Chunk]) -> None:
        for chunk in chunks:
            found.append(decoded(chunk.choices[0].token_ids or b"[]"))
        heard()

    await link.read("/v1/completions", {"prompt": [1]}, TIMEOUT_S, take, is_whole=False, streams=streams)
    return found


async def test_chunks_that_nobody_streams_come_as_one() -> None:
    engine = PlayedEngine(event(1), event(2), event(3, '"stop"'))
    async with linked(engine, every_s=NEVER_S) as link:
        assert await read(link, streams=False) == [[1, 2, 3]]
    assert engine.asked == [("/v1/completions", {"prompt": [1]}, TIMEOUT_S)]


async def test_the_first_tokens_come_before_the_next_beat() -> None:
    engine, heard = PlayedEngine(event(1), event(2), waits=True), asyncio.Event()
    async with linked(engine, every_s=NEVER_S) as link:
        reading = asyncio.create_task(read(link, streams=False, heard=heard.set))
        async with asyncio.timeout(TIMEOUT_S):
            await heard.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_chunks_of_a_stream_come_as_their_engine_made_them() -> None:
    async with linked(PlayedEngine(event(1), event(2), event(3, '"stop"')), every_s=NEVER_S) as link:
        assert await read(link, streams=True) == [[1], [2], [3]]


async def test_tokens_of_an_engine_that_stands_still_come_with_the_next_beat() -> None:
    engine, heard = PlayedEngine(event(1), event(2), waits=True), asyncio.Event()
    async with linked(engine) as link:
        reading = asyncio.create_task(read(link, streams=False, heard=heard.set))
        async with asyncio.timeout(TIMEOUT_S):
            await heard.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        async with asyncio.timeout(TIMEOUT_S):
            await engine.ended.wait()


@pytest.mark.parametrize(
    "error",
    [
        EngineRefused("no", status=422, body={"error": {"message": "no"}}, replica_id="engine-0"),
        EngineUnreachable("it died", replica_id="engine-0"),
        EngineFailed("it broke", replica_id="engine-0"),
    ],
)
async def test_an_error_comes_after_the_tokens_before_it_as_the_engine_raised_it(error: RolloutGatewayError) -> None:
    found: list[int] = []
    async with linked(PlayedEngine(event(1), event(2), error=error), every_s=NEVER_S) as link:
        with pytest.raises(type(error)) as raised:
            await read(link, streams=False, heard=lambda: found.append(1))
    assert found == [1]
    assert str(raised.value) == str(error)
    assert vars(raised.value) == vars(error)


async def test_a_chunk_without_choices_is_a_failure_of_its_engine() -> None:
    async with linked(PlayedEngine(b'{"object":"ping"}')) as link:
        with pytest.raises(EngineFailed, match="without readable choices"):
            await read(link, streams=False)


async def test_a_gateway_with_another_key_gets_nothing() -> None:
    engine = PlayedEngine(event(1, '"stop"'))
    async with linked(engine, key="another") as link:
        with pytest.raises(EngineUnreachable, match="connection to its reader broke"):
            await read(link, streams=False)
    assert engine.asked == []


async def test_a_reader_that_has_gone_is_an_engine_that_cannot_be_reached() -> None:
    async with linked(PlayedEngine()) as link:
        pass
    with pytest.raises(EngineUnreachable, match="takes no connection"):
        await read(link, streams=False)


async def test_a_reader_that_takes_connections_and_stands_still_is_late() -> None:
    with socket.create_server(("127.0.0.1", 0)) as still:
        link = Link("engine-0", f"127.0.0.1:{still.getsockname()[1]}", KEY)
        with pytest.raises(DeadlineExceeded, match=r"no answer to /health within 0\.05 s"):
            await link.call("GET", "/health", None, 0.05)
        await link.close()


async def test_an_answer_that_came_while_the_gateway_stood_still_is_not_late() -> None:
    loop, answer = asyncio.get_running_loop(), msgspec.msgpack.encode(Answer(1, b"{}"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        link = Link("engine-0", f"127.0.0.1:{listening.getsockname()[1]}", KEY)
        calling = asyncio.create_task(link.call("GET", "/health", None, 0.5))
        reader, _ = await loop.sock_accept(listening)
        await loop.sock_recv(reader, 1000)
        reader.send(len(answer).to_bytes(4, "big") + answer)
        time.sleep(0.6)  # noqa: ASYNC251
        assert await calling == b"{}"
        await link.close()
        reader.close()


async def test_a_gateway_makes_all_calls_through_the_reader() -> None:
    replica = await SimReplica("engine-0", 0, SimConfig()).start()
    near = VllmEngine("engine-0", replica.info.url)
    async with linked(cast(Any, near)) as link:
        far = VllmEngine("engine-0", "http://127.0.0.1:1")
        far.beside = link
        await far.health(TIMEOUT_S)
        assert (await far.ask("GET", "/get_world_size", None, TIMEOUT_S))["world_size"] == 1
        await far.label_weights("3", TIMEOUT_S, is_committed=True)
        assert (await near.weight_label(TIMEOUT_S)).version == 3
        with pytest.raises(EngineRefused, match="/nowhere answered 404") as refused:
            await far.ask("POST", "/nowhere", {}, TIMEOUT_S)
        assert refused.value.status == 404
        await replica.kill()
        with pytest.raises(EngineGone):
            await far.health(TIMEOUT_S)
    with pytest.raises(EngineGone, match="/health: its reader has ended"):
        await far.health(TIMEOUT_S)
