"""The chunks of an engine's stream, with choices that can be read."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from engines.engine import Json
from engines.errors import EngineFailed
from gateway.fleet.replica import Replica


async def read_chunks(replica: Replica, path: str, body: Json, n: int, timeout_s: float) -> AsyncGenerator[Json]:
    """The chunks of a replica's engine. Raises `EngineFailed` at a chunk without choices of the `n` samples."""
    async with aclosing(replica.engine.stream(path, body, timeout_s)) as chunks:
        async for chunk in chunks:
            choices = chunk.get("choices")
            if not isinstance(choices, list) or not all(_is_of(choice, n) for choice in choices):
                raise EngineFailed(
                    f"{path}: a chunk's choices are {choices!r:.200}, not choices of {n} samples",
                    replica_id=replica.replica_id,
                )
            yield chunk


def _is_of(choice: Any, n: int) -> bool:
    return isinstance(choice, dict) and isinstance(index := choice.get("index"), int) and 0 <= index < n
