"""The reader beside an engine: serves gateways on a thread with an event loop of its own."""

import asyncio
import hmac
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace

import orjson
import structlog

from engines.chunks import Chunk
from engines.engine import Engine, Json, Take
from engines.errors import EngineFailed, RolloutGatewayError
from engines.raw_json import NO_JSON
from engines.reading.wire import Answer, Ask, Call, Cancel, Failed, Hello, ToGateway, Told, ToReader, Wire
from engines.trace_context import TRACE_CONTEXT
from engines.types import ReplicaInfo

log = structlog.get_logger()

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
EVERY_S = 1.0
"""Time after which a gateway gets what it lacks of open replies: as much is made again where this node is lost."""
_FIRST_S = 0.05
"""The same for its first tokens, with which a gateway knows that the engine has read the prompt."""

Connected = Wire[ToGateway, ToReader]


class ReaderServer:
    """Asks an engine for the gateways that know `key`, and tells them its chunks and answers.

    An engine's request ends with its `Cancel`, and with the connection that it came on.
    """

    def __init__(self, engine: Engine, key: str, every_s: float = EVERY_S) -> None:
        self.engine, self._key, self._every_s = engine, key, every_s
        self._servers: list[asyncio.Server] = []
        self._asks: dict[Connected, dict[int, asyncio.Task[None]]] = {}
        self._telling: set[_Telling] = set()
        self._beating = asyncio.ensure_future(self._beat())

    async def open(self, host: str) -> str:
        """Listen on a free port of `host`; return host and port."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Wire(ToReader, self._received, self._ended), host, 0)
        self._servers.append(server)
        return f"{host}:{server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._beating.cancel()
        for server in self._servers:
            server.close()
        asks = [task for by_number in self._asks.values() for task in by_number.values()]
        for wire in list(self._asks):
            wire.close()
        for task in asks:
            task.cancel()
        await asyncio.gather(self._beating, *asks, return_exceptions=True)
        await self.engine.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            for telling in self._telling:
                telling.tell()

    def _received(self, wire: Connected, message: ToReader) -> None:
        if isinstance(message, Hello):
            if hmac.compare_digest(message.key.encode(), self._key.encode()):
                self._asks.setdefault(wire, {})
                return
        elif (asks := self._asks.get(wire)) is not None:
            if isinstance(message, Cancel):
                if task := asks.get(message.number):
                    task.cancel()
                return
            task = asyncio.create_task(self._answer(wire, message), name="ask")
            asks[message.number] = task
            task.add_done_callback(lambda _: asks.pop(message.number, None))
            return
        log.warning("reader: missing or wrong key", peer=wire.peer)
        wire.close()

    def _ended(self, wire: Connected) -> None:
        for task in self._asks.pop(wire, {}).values():
            task.cancel()

    async def _answer(self, wire: Connected, asked: Ask | Call) -> None:
        TRACE_CONTEXT.set(asked.trace)
        try:
            if isinstance(asked, Call):
                answer = await self.engine.read(asked.method, asked.path, asked.body, asked.timeout_s)
                wire.send(Answer(asked.number, answer))
            else:
                await self._tell(wire, asked, orjson.loads(asked.body))
        except Exception as error:
            if not isinstance(error, RolloutGatewayError):
                log.exception("a reply could not be read in a way that was not foreseen", path=asked.path)
                error = EngineFailed(f"its reader failed: {error!r:.200}", replica_id=self.engine.replica_id)
            wire.send(Failed.of(asked.number, error))

    async def _tell(self, wire: Connected, ask: Ask, body: Json) -> None:
        telling = _Telling(wire, ask)
        self._telling.add(telling)
        try:
            await read(self.engine, ask.path, body, ask.timeout_s, telling.take, is_whole=ask.is_whole)
            wire.send(Told(ask.number, telling.rest(), is_last=True))
        except Exception:
            telling.tell()
            raise
        finally:
            self._telling.discard(telling)
            telling.close()


class _Telling:
    """Tells a gateway the chunks of one reply: as they come, or joined, so that a long reply costs it little."""

    def __init__(self, wire: Connected, ask: Ask) -> None:
        self._wire, self._ask = wire, ask
        self._ready: list[Chunk] = []
        self._ends: dict[int, int] = {}
        self._has_begun = False
        self._timer: asyncio.Handle | None = None

    def take(self, chunks: list[Chunk]) -> None:
        """Take chunks that came together. They are told once the engine's block is read, where the reply may end too;
        chunks that are joined with a sample's end, but the first of them soon."""
        self._ready += chunks
        choices = (choice for chunk in chunks for choice in chunk.choices)
        loop = asyncio.get_running_loop()
        if not self._ask.joins or any(choice.finish_reason is not None for choice in choices):
            self.close()
            self._timer = loop.call_soon(self.tell)
        elif self._timer is None:
            self._timer = loop.call_later(_FIRST_S, self.tell)

    def tell(self) -> None:
        """Tell what was not told."""
        if chunks := self.rest():
            self._wire.send(Told(self._ask.number, chunks))

    def rest(self) -> list[Chunk]:
        """What was not told."""
        chunks, self._ready = self._ready, []
        if chunks and self._ask.joins:
            chunks = [Chunk.joined(chunks, self._ends)]
        for chunk in chunks:
            chunk.shed(has_head=not self._has_begun)
            self._has_begun = True
        return chunks

    def close(self) -> None:
        """Tell no more, also where the request was cancelled."""
        if self._timer is not None:
            self._timer.cancel()


async def read(engine: Engine, path: str, body: Json, timeout_s: float, take: Take, *, is_whole: bool) -> None:
    """Ask an engine; have `take` get its chunks. Return at the reply's end, which is one chunk with `is_whole`.

    Raises the errors of `Engine`, and `EngineFailed` for a chunk without readable choices.
    """
    if is_whole:
        take([_chunk(engine, await engine.reply(path, body, timeout_s))])
        return
    async with aclosing(engine.events(path, body, timeout_s)) as blocks:
        async for events in blocks:
            take([_chunk(engine, event) for event in events])


def _chunk(engine: Engine, event: bytes) -> Chunk:
    try:
        return Chunk.read(event)
    except NO_JSON as error:
        reason = f"its chunk is {event!r:.200}, without readable choices: {error}"
        raise EngineFailed(reason, replica_id=engine.replica_id) from error


class ReaderThread:
    """A `ReaderServer` on its own thread, so that no work of the host delays tokens."""

    def __init__(self, connect: Callable[[], Engine]) -> None:
        """`connect` makes the engine's client, on the thread."""
        self._key = secrets.token_hex(32)
        self._connect = connect
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, ReaderServer]] = Future()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._started.result(_START_TIMEOUT_S)

    async def beside(self, info: ReplicaInfo, host: str) -> ReplicaInfo:
        """Listen on a free port of `host`; return the replica's description with it."""
        loop, _, server = self._started.result()
        opening = asyncio.run_coroutine_threadsafe(server.open(host), loop)
        return replace(info, reader=await asyncio.wrap_future(opening), reader_key=self._key)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        loop, stopping, _ = self._started.result()
        loop.call_soon_threadsafe(stopping.set)
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        import uvloop  # here: the base package has no serve extra

        uvloop.run(self._serve())

    async def _serve(self) -> None:
        stopping, server = asyncio.Event(), ReaderServer(self._connect(), self._key)
        self._started.set_result((asyncio.get_running_loop(), stopping, server))
        await stopping.wait()
        await server.close()
