"""Several streams read at once, as one."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from engines.engine import Json


async def merged(streams: Iterable[AsyncGenerator[Json]]) -> AsyncGenerator[Json]:
    """The chunks of all streams as they come. The first stream that fails ends the others."""
    chunks: asyncio.Queue[Json | None] = asyncio.Queue()

    async def one(stream: AsyncGenerator[Json]) -> None:
        async with aclosing(stream):
            async for chunk in stream:
                chunks.put_nowait(chunk)

    async def all_streams() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for stream in streams:
                    group.create_task(one(stream))
        finally:
            chunks.put_nowait(None)

    producer = asyncio.create_task(all_streams(), name="merge streams")
    try:
        while (chunk := await chunks.get()) is not None:
            yield chunk
        await producer
    except* Exception as errors:
        raise errors.exceptions[0] from None
    finally:
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)
