"""Several calls or streams at once. The first failure ends the others."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from engines.engine import Json

T = TypeVar("T")


async def gathered(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls, in their order. Raises the error of the first call that fails."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def until(ended: asyncio.Event, stream: AsyncGenerator[Json]) -> AsyncGenerator[Json]:
    """The chunks of a stream until it ends or the event is set."""
    waiting = asyncio.create_task(ended.wait())
    try:
        async with aclosing(merged([stream])) as chunks:
            while True:
                reading = asyncio.ensure_future(anext(chunks, None))
                await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                    return
                if (chunk := reading.result()) is None:
                    return
                yield chunk
    finally:
        waiting.cancel()


async def merged(streams: Iterable[AsyncGenerator[Json]]) -> AsyncGenerator[Json]:
    """The chunks of all streams in the order of their arrival. Raises the error of the first stream that fails."""
    chunks: asyncio.Queue[Json | None] = asyncio.Queue()

    async def read(stream: AsyncGenerator[Json]) -> None:
        async with aclosing(stream):
            async for chunk in stream:
                chunks.put_nowait(chunk)

    async def read_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for stream in streams:
                    group.create_task(read(stream))
        finally:
            chunks.put_nowait(None)

    reader = asyncio.create_task(read_all(), name="merge streams")
    try:
        while (chunk := await chunks.get()) is not None:
            yield chunk
        await reader
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
