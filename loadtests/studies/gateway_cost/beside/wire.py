"""Frames between a gateway and the reader beside an engine: msgpack with its length before."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct


class Ask(Struct, array_like=True, gc=False):
    """A request for the engine. `kind`: "samples" are joined, "events" are shown to a client, "raw" are bytes."""

    number: int
    kind: str
    path: str
    body: bytes
    is_whole: bool
    num_samples: int
    timeout_s: float
    first: int = 0
    shows_ids: bool = True


class Ended(Struct, array_like=True, gc=False):
    """A sample that has ended: `choice` is its JSON without the closing brace, and without what the gateway knows."""

    index: int
    num_made: int
    num_unscored: int
    finish_reason: str | None
    report: list[dict[str, Any]]
    choice: bytes


class Made(Struct, array_like=True, gc=False):
    """What was made of one sample since the frame before. `lists` have the items of JSON lists, without brackets;
    `fields` are those of the last choice, as JSON."""

    index: int
    num_new: int
    text: bytes
    lists: dict[str, bytes]
    finish_reason: str | None
    report: list[dict[str, Any]]
    fields: dict[str, bytes]


class Frame(Struct, array_like=True, gc=False):
    number: int
    samples: list[Made]
    head: bytes
    usage: dict[str, Any] | None
    is_last: bool
    error: str
    raw: bytes
    ended: list[Ended] = []
    kept: dict[int, bytes] = {}


class Frames(asyncio.Protocol):
    """Sends and receives messages, those of one turn together."""

    def __init__(self, receives: Any, received: Callable[[Any, "Frames"], None]) -> None:
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._received, self._transport = received, None
        self._waiting: list[bytes] = []
        self._came = bytearray()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def send(self, message: Any) -> None:
        content = self._encode(message)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting += (len(content).to_bytes(4, "big"), content)

    def _flush(self) -> None:
        assert self._transport is not None
        self._transport.writelines(self._waiting)
        self._waiting = []

    def data_received(self, data: bytes) -> None:
        if self._came:
            self._came += data
            data = self._came
            if len(data) < 4 + int.from_bytes(data[:4], "big"):
                return
            data = bytes(data)
        view, begin = memoryview(data), 0
        while len(data) - begin >= 4:
            length = int.from_bytes(view[begin : begin + 4], "big")
            if len(data) < begin + 4 + length:
                break
            self._received(self._decode(view[begin + 4 : begin + 4 + length]), self)
            begin += 4 + length
        self._came = bytearray(view[begin:])
