"""The gateway's end: asks the reader beside an engine."""

import asyncio
from typing import NamedTuple

from engines.engine import Json, Take, body_in_json
from engines.errors import DeadlineExceeded, EngineGone, EngineUnreachable
from engines.reading.wire import Answer, Ask, Call, Cancel, Failed, Hello, ToGateway, Told, ToReader, Wire
from engines.trace_context import TRACE_CONTEXT

_CONNECT_TIMEOUT_S = 10.0
_SLACK_S = 5.0


class _Asked(NamedTuple):
    """A request under way: who takes its chunks, and its end, with the answer to a call."""

    take: Take
    end: asyncio.Future[bytes]

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

    async def read(self, path: str, body: Json, timeout_s: float, take: Take, *, is_whole: bool, streams: bool) -> None:
        """Have the engine asked; `take` gets its chunks as they come, those of a reply that nobody streams joined, and
        its errors end the request. Return at the reply's end."""
        joins, trace = not (streams or is_whole), TRACE_CONTEXT.get()
        ask = Ask(self._next_number(), path, body_in_json(body), timeout_s, is_whole, joins, trace)
        await self._end_of(ask, take, timeout_s + _SLACK_S)

    async def call(self, method: str, path: str, body: Json | bytes | None, timeout_s: float) -> bytes:
        """Have the engine asked on a route of its own; return its answer as it was written."""
        call = Call(self._next_number(), method, path, body_in_json(body), timeout_s, TRACE_CONTEXT.get())
        try:
            return await self._end_of(call, lambda _: None, timeout_s)
        except EngineUnreachable as error:
            if isinstance(error.__cause__, ConnectionRefusedError):  # the engine ends with its reader's process
                raise EngineGone(f"{path}: its reader has ended", replica_id=self._replica_id) from error
            raise

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    async def _end_of(self, ask: Ask | Call, take: Take, limit_s: float) -> bytes:
        self._asks[ask.number] = asked = _Asked(take, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(limit_s):
                wire = self._wire or await self._connected()
                wire.send(ask)
                return await asked.end
        except TimeoutError:
            if asked.end.done() and not asked.end.cancelled():  # it came while this process stood still
                return asked.end.result()
            raise DeadlineExceeded(
                f"replica {self._replica_id}: no answer to {ask.path} within {ask.timeout_s:g} s"
            ) from None
        finally:
            if self._asks.pop(ask.number, None) and self._wire is not None:
                self._wire.send(Cancel(ask.number))

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
        if (asked := self._asks.get(message.number)) is None or asked.end.done():
            return
        try:
            if isinstance(message, Failed):
                raise message.error()
            if isinstance(message, Told):
                asked.take(message.chunks)
            if isinstance(message, Answer) or message.is_last:
                asked.end.set_result(message.content if isinstance(message, Answer) else b"")
        except Exception as error:
            asked.end.set_exception(error)
        if not isinstance(message, Told) or message.is_last:
            del self._asks[message.number]

    def _ended(self, wire: Wire[ToReader, ToGateway]) -> None:
        if wire is not self._wire:
            return
        self._wire = None
        broken, self._asks = self._asks, {}
        for asked in broken.values():
            asked.fail(self._unreachable("the connection to its reader broke"))

    def _unreachable(self, reason: str) -> EngineUnreachable:
        return EngineUnreachable(reason, replica_id=self._replica_id)
