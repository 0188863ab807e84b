"""The chunks of a stream, which a slow reader does not hold up, and the token counts in them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

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

    task = asyncio.ensure_future(work(show))
    task.add_done_callback(lambda _: news.set())
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


def total_usage(usages: Iterable[Json]) -> Json:
    """The token counts of the prompts of one request as one."""
    read = made = cached = 0
    total: Json = {}
    for usage in usages:
        read += usage.get("prompt_tokens") or 0
        made += usage.get("completion_tokens") or 0
        if details := usage.get("prompt_tokens_details"):
            cached += details.get("cached_tokens") or 0
            total["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made} | total


def wants_usage(body: Json) -> bool:
    """True if a stream ends with a chunk that has its usage and no choices."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def with_usage_rule(chunk: Json, body: Json) -> Json:
    """A chunk before the last: its usage is null where the last chunk has it, unless every chunk is to have it."""
    if not (body.get("stream_options") or {}).get("continuous_usage_stats"):
        chunk.pop("usage", None)
    return chunk | {"usage": chunk.get("usage")} if wants_usage(body) else chunk
