"""The gateway's end: asks the reader beside an engine."""

import asyncio
from collections.abc import AsyncGenerator

from engines.chunks import Chunk
from engines.engine import Json, body_in_json
from engines.errors import DeadlineExceeded, EngineUnreachable
from engines.reading.wire import Alive, Ask, Cancel, Failed, Hello, ToGateway, Told, ToReader, Wire
from engines.trace_context import TRACE_CONTEXT

_CONNECT_TIMEOUT_S = 10.0
_SLACK_S = 5.0
_LATE, _BROKEN = object(), object()


class Link:
    """The connection to one reader; it is made for the first request, and again after its end."""

    def __init__(self, replica_id: str, address: str, key: str) -> None:
        host, _, port = address.rpartition(":")
        self._replica_id, self._host, self._port, self._key = replica_id, host, int(port), key
        self._wire: Wire[ToReader, ToGateway] | None = None
        self._opening = asyncio.Lock()
        self._asks: dict[int, asyncio.Queue[object]] = {}
        self._number = 0
        self._hears = asyncio.Event()

    async def chunks(
        self, path: str, body: Json, timeout_s: float, *, is_whole: bool, streams: bool
    ) -> AsyncGenerator[list[Chunk]]:
        """As `chunks_of`. The chunks of a reply that nobody streams are joined."""
        self._number = number = self._number + 1
        queue: asyncio.Queue[object] = asyncio.Queue()
        self._asks[number] = queue
        late = asyncio.get_running_loop().call_later(timeout_s + _SLACK_S, queue.put_nowait, _LATE)
        wire = None
        try:
            wire = await self._connected()
            joins = not (streams or is_whole)
            wire.send(Ask(number, path, body_in_json(body), timeout_s, is_whole, joins, TRACE_CONTEXT.get()))
            while isinstance(message := await queue.get(), Told):
                yield message.chunks
            if message is _LATE:
                raise DeadlineExceeded(f"replica {self._replica_id}: no answer to {path} within {timeout_s:g} s")
            wire = None
            if message is _BROKEN:
                raise self._unreachable("the connection to its reader broke")
            if isinstance(message, Failed):
                raise message.error()
        finally:
            late.cancel()
            del self._asks[number]
            if wire is not None:
                wire.send(Cancel(number))

    async def check(self, timeout_s: float) -> None:
        """Raise unless the reader answers within so many seconds: a process that stands still takes connections."""
        try:
            async with asyncio.timeout(timeout_s):
                wire = await self._connected()
                self._hears.clear()
                wire.send(Hello(self._key))
                await self._hears.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"replica {self._replica_id}: its reader is silent for {timeout_s:g} s") from None
        if self._wire is not wire:
            raise self._unreachable("the connection to its reader broke")

    async def close(self) -> None:
        """End the connection; requests in flight fail."""
        if self._wire is not None:
            self._wire.close()

    async def _connected(self) -> Wire[ToReader, ToGateway]:
        async with self._opening:
            if self._wire is None:
                try:
                    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                        _, wire = await asyncio.get_running_loop().create_connection(
                            lambda: Wire[ToReader, ToGateway](ToGateway, self._received, self._ended),
                            self._host,
                            self._port,
                        )
                except OSError as error:  # also TimeoutError
                    reason = f"its reader at {self._host}:{self._port} takes no connection: {error or 'timeout'}"
                    raise self._unreachable(reason) from error
                wire.send(Hello(self._key))
                self._wire = wire
            return self._wire

    def _received(self, _: Wire[ToReader, ToGateway], message: ToGateway) -> None:
        self._hears.set()
        if not isinstance(message, Alive) and (queue := self._asks.get(message.number)) is not None:
            queue.put_nowait(message)

    def _ended(self, wire: Wire[ToReader, ToGateway]) -> None:
        if wire is not self._wire:
            return
        self._wire = None
        self._hears.set()
        for queue in self._asks.values():
            queue.put_nowait(_BROKEN)

    def _unreachable(self, reason: str) -> EngineUnreachable:
        return EngineUnreachable(reason, replica_id=self._replica_id)
