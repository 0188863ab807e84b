"""The gateway's end: asks the reader beside an engine."""

import asyncio
from typing import NamedTuple

from engines.engine import Json, Take, body_in_json
from engines.errors import DeadlineExceeded, EngineUnreachable
from engines.reading.wire import Alive, Ask, Cancel, Failed, Hello, ToGateway, ToReader, Wire
from engines.trace_context import TRACE_CONTEXT

_CONNECT_TIMEOUT_S = 10.0
_SLACK_S = 5.0


class _Asked(NamedTuple):
    """A request under way: who takes its chunks, and its end."""

    take: Take
    end: asyncio.Future[None]

    def fail(self, error: Exception) -> None:
        if not self.end.done():
            self.end.set_exception(error)


class Link:
    """The connection to one reader; it is made for the first request, and again after its end."""

    def __init__(self, replica_id: str, address: str, key: str) -> None:
        host, _, port = address.rpartition(":")
        self._replica_id, self._host, self._port, self._key = replica_id, host, int(port), key
        self._wire: Wire[ToReader, ToGateway] | None = None
        self._opening = asyncio.Lock()
        self._asks: dict[int, _Asked] = {}
        self._number = 0
        self._hears = asyncio.Event()

    async def read(self, path: str, body: Json, timeout_s: float, take: Take, *, is_whole: bool, streams: bool) -> None:
        """Have the engine asked; `take` gets its chunks as they come, those of a reply that nobody streams joined, and
        its errors end the request. Return at the reply's end."""
        self._number = number = self._number + 1
        content, joins = body_in_json(body), not (streams or is_whole)
        loop = asyncio.get_running_loop()
        self._asks[number] = asked = _Asked(take, loop.create_future())
        timer = loop.call_later(timeout_s + _SLACK_S, self._late, asked, path, timeout_s)
        try:
            wire = self._wire or await self._connected()
            wire.send(Ask(number, path, content, timeout_s, is_whole, joins, TRACE_CONTEXT.get()))
            await asked.end
        finally:
            timer.cancel()
            if self._asks.pop(number, None) and self._wire is not None:
                self._wire.send(Cancel(number))

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

    def _late(self, asked: _Asked, path: str, timeout_s: float) -> None:
        asked.fail(DeadlineExceeded(f"replica {self._replica_id}: no answer to {path} within {timeout_s:g} s"))

    def _received(self, _: Wire[ToReader, ToGateway], message: ToGateway) -> None:
        self._hears.set()
        if isinstance(message, Alive) or (asked := self._asks.get(message.number)) is None or asked.end.done():
            return
        try:
            if isinstance(message, Failed):
                raise message.error()
            asked.take(message.chunks)
            if message.is_last:
                asked.end.set_result(None)
        except Exception as error:
            asked.end.set_exception(error)
        if isinstance(message, Failed) or message.is_last:
            del self._asks[message.number]

    def _ended(self, wire: Wire[ToReader, ToGateway]) -> None:
        if wire is not self._wire:
            return
        self._wire = None
        self._hears.set()
        broken, self._asks = self._asks, {}
        for asked in broken.values():
            asked.fail(self._unreachable("the connection to its reader broke"))

    def _unreachable(self, reason: str) -> EngineUnreachable:
        return EngineUnreachable(reason, replica_id=self._replica_id)
