"""Asks an engine and reads its chunks."""

from contextlib import aclosing

from engines.chunks import Chunk
from engines.engine import Engine, Json, Take
from engines.errors import EngineFailed
from engines.raw_json import NO_JSON


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
