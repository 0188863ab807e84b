"""Messages between a gateway and the reader beside an engine: msgpack, each with its length before.

Lists of tokens and log-probs pass as bytes, which nobody looks into on the way.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import structlog
from msgspec import Struct

from engines import errors
from engines.chunks import Chunk
from engines.engine import Json
from engines.errors import RolloutGatewayError

log = structlog.get_logger()

S = TypeVar("S")
R = TypeVar("R")

_LENGTH_BYTES = 4
_LONGEST_BYTES = 1 << 30


class Hello(Struct, tag=0, array_like=True, gc=False):
    """The first message of a gateway."""

    key: str


class Ask(Struct, tag=1, array_like=True, gc=False):
    """A request for the engine, in JSON. With `joins` its chunks are few."""

    number: int
    path: str
    body: bytes
    timeout_s: float
    is_whole: bool
    joins: bool
    trace: dict[str, str]


class Call(Struct, tag=6, array_like=True, gc=False):
    """A request for a route of the engine's own, with its body in JSON."""

    number: int
    method: str
    path: str
    body: bytes
    timeout_s: float
    trace: dict[str, str]


class Cancel(Struct, tag=2, array_like=True, gc=False):
    """Nobody waits for the reply any more."""

    number: int


class Told(Struct, tag=3, array_like=True, gc=False):
    """Chunks of a reply, which is whole with the last."""

    number: int
    chunks: list[Chunk]
    is_last: bool = False


class Answer(Struct, tag=7, array_like=True, gc=False):
    """The engine's answer to a `Call`, as it was written."""

    number: int
    content: bytes


class Failed(Struct, tag=4, array_like=True, gc=False):
    """A reply has ended with an error: the name of its class, its message and its attributes."""

    number: int
    kind: str
    text: str
    attributes: Json

    @classmethod
    def of(cls, number: int, error: RolloutGatewayError) -> "Failed":
        return cls(number, type(error).__name__, str(error), vars(error))

    def error(self) -> RolloutGatewayError:
        kind = getattr(errors, self.kind)
        error: RolloutGatewayError = kind.__new__(kind, self.text)
        vars(error).update(self.attributes)
        return error


ToReader = Hello | Ask | Call | Cancel
ToGateway = Told | Answer | Failed


class Wire(asyncio.Protocol, Generic[S, R]):
    """One end of a connection. All that is sent in one turn of the event loop leaves together.

    `received` is called for each message that comes, `ended` once, when the connection ends or the other end breaks the
    protocol.
    """

    def __init__(
        self, receives: Any, received: Callable[["Wire[S, R]", R], None], ended: Callable[["Wire[S, R]"], None]
    ) -> None:
        """`receives` is the union of the messages that come."""
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._received, self._ended = received, ended
        self._transport: asyncio.Transport | None = None
        self._waiting: list[bytes] = []
        self._came = bytearray()

    def send(self, message: S) -> None:
        """Have a message leave at the end of this turn; none leaves a connection that has ended."""
        content = self._encode(message)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting += (len(content).to_bytes(_LENGTH_BYTES, "big"), content)

    def _flush(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(self._waiting)
        self._waiting = []

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no asyncio.Transport
        self.peer: Any = transport.get_extra_info("peername")

    def data_received(self, data: bytes) -> None:
        self._came += data
        begin = 0
        with memoryview(self._came) as came:
            while len(came) - begin >= _LENGTH_BYTES:
                length = int.from_bytes(came[begin : begin + _LENGTH_BYTES], "big")
                if length > _LONGEST_BYTES:
                    self._break(f"a message of {length} bytes")
                    return
                end = begin + _LENGTH_BYTES + length
                if end > len(came):
                    break
                try:
                    message = self._decode(came[begin + _LENGTH_BYTES : end])
                except (msgspec.DecodeError, msgspec.ValidationError) as error:
                    self._break(f"a message cannot be read: {error}")
                    return
                begin = end
                self._received(self, message)
        del self._came[:begin]

    def connection_lost(self, exc: BaseException | None) -> None:
        self._ended(self)

    def _break(self, reason: str) -> None:
        log.error("a connection between a gateway and a reader is closed", reason=reason, peer=self.peer)
        self.close()
