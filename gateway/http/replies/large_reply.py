"""Sends a reply of any size without a copy of the whole, and without a long turn of the event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import web

from gateway.http.replies.parted import name, parted

_JSON = {"Content-Type": "application/json"}
_SMALL_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 18


BeforeEnd = Callable[[], Awaitable[None]]


async def at_once() -> None:
    """Nothing to do before the end."""


async def send_pieces(
    request: web.Request, pieces: Iterator[bytes], num_bytes: int, before_end: BeforeEnd = at_once
) -> web.StreamResponse:
    """Send JSON in pieces, of about `num_bytes` in all; return once it has left. Raise `ConnectionError` where the
    client is gone. A client that does not read is cut off by its connection.

    `before_end` is awaited before the bytes without which no client takes the reply for whole.
    """
    if num_bytes < _SMALL_BYTES:
        await before_end()
        return await _send_small(request, b"".join(pieces))
    response = parted(request, _JSON)
    await response.prepare(request)
    for block in _blocks(pieces):
        await response.write(block)
        await asyncio.sleep(0)  # a client that reads as fast as this writes would keep the loop
    await before_end()
    await response.write_eof()
    return response


async def _send_small(request: web.Request, content: bytes) -> web.Response:
    response = web.Response(body=content, headers=_JSON)
    name(response, request)
    await response.prepare(request)
    await response.write_eof()
    return response


def _blocks(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Pieces in blocks of about one size."""
    block: list[bytes] = []
    size = 0
    for piece in pieces:
        for begin in range(0, len(piece), _BLOCK_BYTES):
            block.append(piece[begin : begin + _BLOCK_BYTES])
            size += len(block[-1])
            if size >= _BLOCK_BYTES:
                yield b"".join(block)
                block, size = [], 0
    yield b"".join(block)
