"""Several streams at once. The first failure ends the others."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from engines.engine import Json
from gateway.fleet.together import together


async def until(ended: asyncio.Event, stream: AsyncGenerator[Json]) -> AsyncGenerator[Json]:
    """The chunks of a stream until it ends or the event is set."""
    waiting = asyncio.create_task(ended.wait())
    try:
        async with aclosing(merged([stream])) as chunks:
            while True:
                reading = asyncio.ensure_future(anext(chunks, None))
                try:
                    await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if is_over := not reading.done():  # a stream that is still read cannot be closed
                        reading.cancel()
                        await asyncio.gather(reading, return_exceptions=True)
                if is_over or (chunk := reading.result()) is None:
                    return
                yield chunk
    finally:
        waiting.cancel()


async def merged(streams: Iterable[AsyncGenerator[Json]]) -> AsyncGenerator[Json]:
    """The chunks of all streams in the order of their arrival. Raises the error of the first stream that fails."""
    async with aclosing(read_ahead(streams)) as blocks:
        async for chunks in blocks:
            for chunk in chunks:
                yield chunk


async def read_ahead(streams: Iterable[AsyncGenerator[Json]]) -> AsyncGenerator[list[Json]]:
    """As `merged`, in lists of the chunks that have come since the last list was taken."""
    ready: list[Json] = []
    news, has_ended = asyncio.Event(), False

    async def read(stream: AsyncGenerator[Json]) -> None:
        async with aclosing(stream):
            async for chunk in stream:
                ready.append(chunk)
                news.set()

    async def read_all() -> None:
        nonlocal has_ended
        try:
            await together(map(read, streams))
        finally:
            has_ended = True
            news.set()

    reader = asyncio.create_task(read_all(), name="merge streams")
    try:
        while ready or not has_ended:
            await news.wait()
            news.clear()
            if ready:
                chunks, ready[:] = ready[:], []
                yield chunks
        await reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
