"""Sends the calls of a session, as NDJSON or as msgpack.

In msgpack each event comes after its length, itself a msgpack integer of five bytes: a reader with a streaming decoder
sees both in turn, any other cuts by length. Arrays are int32 and float32 bytes there, little-endian. Other bytes are
base64 in NDJSON.
"""

import struct
from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from enum import StrEnum

import msgspec
import numpy as np
import orjson
from aiohttp import web

from engines.engine import Json
from engines.errors import InvalidRequest

_DTYPES = {"token_ids": "<i4", "prompt_token_ids": "<i4", "logprobs": "<f4"}
_LENGTH = struct.Struct(">BI")
_UINT32 = 0xCE


class Wire(StrEnum):
    """A form of events, by its media type."""

    NDJSON = "application/x-ndjson"
    MSGPACK = "application/msgpack"


_NAMES = {str(wire): wire for wire in Wire} | dict.fromkeys(("application/json", "application/*", "*/*"), Wire.NDJSON)


def wire_of(request: web.Request) -> Wire:
    """Return the form that the client accepts. Raise `InvalidRequest` where it accepts none."""
    accepted = request.headers.get("Accept", "*/*")
    for name in accepted.split(","):
        if wire := _NAMES.get(name.partition(";")[0].strip().lower()):
            return wire
    raise InvalidRequest(f"Accept: {accepted[:80]!r} is unknown here: send {Wire.NDJSON} or {Wire.MSGPACK}")


async def send_records(request: web.Request, head: Json, events: AsyncGenerator[Sequence[bytes]]) -> web.StreamResponse:
    """Send `head`, then the events, which are msgpack. A client that stops reading is cut off by its connection."""
    wire = wire_of(request)
    response = web.StreamResponse(headers={"Content-Type": wire, "Cache-Control": "no-cache"})
    write = packed if wire is Wire.MSGPACK else as_lines
    async with aclosing(events):
        await response.prepare(request)
        await response.write(write([msgspec.msgpack.encode(head)]))
        async for some in events:
            await response.write(write(some))
    await response.write_eof()
    return response


def packed(events: Sequence[bytes]) -> bytes:
    """Frame events."""
    return b"".join(part for event in events for part in (_LENGTH.pack(_UINT32, len(event)), event))


def as_lines(events: Sequence[bytes]) -> bytes:
    """Turn events into lines of JSON."""
    return b"".join(_line(msgspec.msgpack.decode(event)) for event in events)


def _line(event: Json) -> bytes:
    for name, dtype in _DTYPES.items():
        if isinstance(content := event.get(name), bytes):
            event[name] = np.frombuffer(content, dtype)
    return orjson.dumps(event, lambda content: b64encode(content).decode(), orjson.OPT_SERIALIZE_NUMPY) + b"\n"
