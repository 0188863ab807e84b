"""The chunks of a stream: its work passes them on as they come, and a slow reader does not hold the work up."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from engines.engine import Json

Show = Callable[[Json], None]
"""Takes a chunk."""
Streaming = Callable[[Show], Awaitable[None]]
"""Makes the chunks of a stream."""


async def blocks_of(work: Streaming) -> AsyncGenerator[list[Json]]:
    """Yield the chunks in lists of those that have come since the last list was taken. Raise the work's error; end it
    where the reader leaves."""
    ready: list[Json] = []
    news = asyncio.Event()

    def show(chunk: Json) -> None:
        ready.append(chunk)
        news.set()

    async def run() -> None:
        try:
            await work(show)
        finally:
            news.set()

    task = asyncio.create_task(run(), name="stream")
    try:
        while ready or not task.done():
            await news.wait()
            news.clear()
            if ready:
                chunks, ready[:] = ready[:], []
                yield chunks
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
