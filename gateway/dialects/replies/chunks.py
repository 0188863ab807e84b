"""The chunks of an engine's stream, with choices that can be read; their log-probs are carried."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from engines.engine import Json
from engines.errors import EngineFailed
from gateway.dialects.replies.carried import NO_JSON, carried_chunk
from gateway.fleet.replica import Replica


async def read_chunks(replica: Replica, path: str, body: Json, n: int, timeout_s: float) -> AsyncGenerator[list[Json]]:
    """The chunks of a replica's engine, in lists of those that came together.

    Raises `EngineFailed` at a chunk without choices of the `n` samples; the chunks that came before it are yielded.
    """
    async with aclosing(replica.engine.events(path, body, timeout_s)) as blocks:
        async for events in blocks:
            chunks: list[Json] = []
            for event in events:
                try:
                    chunks.append(_chunk(event, n))
                except ValueError as error:
                    if chunks:
                        yield chunks
                    raise EngineFailed(f"{path}: {error}", replica_id=replica.replica_id) from error
            yield chunks


def _chunk(event: bytes, n: int) -> Json:
    """A chunk. Raises `ValueError` if it is none."""
    try:
        chunk = carried_chunk(event)
    except NO_JSON as error:
        raise ValueError(f"a chunk is {event!r:.200}, not choices of {n} samples: {error}") from error
    if not all(_is_of(choice, n) for choice in chunk["choices"]):
        raise ValueError(f"a chunk's choices are {chunk['choices']!r:.200}, not choices of {n} samples")
    return chunk


def _is_of(choice: Json, n: int) -> bool:
    return isinstance(index := choice.get("index"), int) and 0 <= index < n
