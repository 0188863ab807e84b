"""Asks an engine and reads its chunks, in the process that calls it or in one beside the engine."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from engines.chunks import Chunk
from engines.engine import Engine, Json
from engines.errors import EngineFailed
from engines.raw_json import NO_JSON

_LARGE_BYTES = 1 << 14


def chunks_of(
    engine: Engine, path: str, body: Json, timeout_s: float, *, is_whole: bool, streams: bool
) -> AsyncGenerator[list[Chunk]]:
    """As `chunks_here`, read beside the engine where there is a reader. Chunks that nobody streams are joined then."""
    if engine.beside is not None:
        return engine.beside.chunks(path, body, timeout_s, is_whole=is_whole, streams=streams)
    return chunks_here(engine, path, body, timeout_s, is_whole=is_whole)


async def chunks_here(
    engine: Engine, path: str, body: Json, timeout_s: float, *, is_whole: bool
) -> AsyncGenerator[list[Chunk]]:
    """Ask an engine; yield its chunks, in lists of those that came together. The reply is one chunk with `is_whole`.

    Raises the errors of `Engine`, and `EngineFailed` for a chunk without readable choices.
    """
    if is_whole:
        reply = await engine.reply(path, body, timeout_s)
        yield [await _large(engine, reply) if len(reply) > _LARGE_BYTES else _chunk(engine, reply)]
        return
    async with aclosing(engine.events(path, body, timeout_s)) as blocks:
        async for events in blocks:
            yield [_chunk(engine, event) for event in events]


async def _large(engine: Engine, reply: bytes) -> Chunk:
    async with engine.turn:
        await asyncio.sleep(0)
        return _chunk(engine, reply)


def _chunk(engine: Engine, event: bytes) -> Chunk:
    try:
        return Chunk.read(event)
    except NO_JSON as error:
        reason = f"its chunk is {event!r:.200}, without readable choices: {error}"
        raise EngineFailed(reason, replica_id=engine.replica_id) from error
