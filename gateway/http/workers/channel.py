"""A channel between two processes over a pair of sockets: messages in msgpack, each with its length before."""

import asyncio
import socket
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import structlog

log = structlog.get_logger()

S = TypeVar("S")
R = TypeVar("R")

_LENGTH_BYTES = 4
_LONGEST_BYTES = 1 << 28
# What the other process has not read: it stands still.
_MOST_UNREAD_BYTES = 1 << 28


class Channel(asyncio.Protocol, Generic[S, R]):
    """Sends messages of one union and receives those of another, in order.

    All that is sent in one turn of the event loop leaves together. `received` is called for each message that comes,
    `ended` once, when the other end is closed or breaks the protocol.
    """

    def __init__(self, receives: Any, received: Callable[[R], None], ended: Callable[[], None]) -> None:
        """`receives` is the union of the messages that come."""
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._received = received
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._waiting: list[bytes] = []
        self._came = bytearray()
        self._has_ended = False

    async def open(self, end: socket.socket) -> None:
        """Begin over a connected socket, which belongs to the channel from now on."""
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, message: S) -> None:
        """Have a message leave at the end of this turn; none leaves a channel that has ended."""
        if self._has_ended:
            return
        content = self._encode(message)  # here, where its sender learns that it cannot be written
        if len(content) > _LONGEST_BYTES:
            raise ValueError(f"a {type(message).__name__} of {len(content)} bytes: at most {_LONGEST_BYTES}")
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting += (len(content).to_bytes(_LENGTH_BYTES, "big"), content)

    def flush(self) -> None:
        """Have all messages leave now."""
        if not self._waiting or self._transport is None or self._has_ended:
            return
        self._transport.write(b"".join(self._waiting))
        self._waiting = []
        if self._transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            log.error("the other process reads no messages", unread_bytes=self._transport.get_write_buffer_size())
            self._transport.abort()

    def close(self) -> None:
        """Have what was sent leave, and end."""
        self.flush()
        self._has_ended = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is no asyncio.Transport
        self.flush()

    def data_received(self, data: bytes) -> None:
        self._came += data
        begin = 0
        while len(self._came) - begin >= _LENGTH_BYTES:
            content = begin + _LENGTH_BYTES
            length = int.from_bytes(self._came[begin:content], "big")
            if length > _LONGEST_BYTES:
                self._break(f"a message of {length} bytes")
                return
            if len(self._came) < content + length:
                break
            begin = content + length
            try:
                self._received(self._decode(bytes(self._came[content:begin])))
            except Exception as error:  # of any kind: a message that is lost would be missed for ever
                # Without its text and its locals, which may have keys.
                self._break(type(error).__name__, traceback="".join(traceback.format_tb(error.__traceback__)))
                return
        if begin:
            del self._came[:begin]

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._ended()

    def _break(self, reason: str, **facts: str) -> None:
        log.error("a message cannot be dealt with, and the channel is closed", reason=reason, **facts)
        if self._transport is not None:
            self._transport.abort()
