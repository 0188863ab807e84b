"""Waits on the event loop: bounded ones, and turns for others."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event, at most so long. Return False where it was not set in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


async def in_turns(items: Iterable[T], at_once: int) -> AsyncIterator[T]:
    """Yield the items, and let others have a turn of the loop after so many."""
    for place, item in enumerate(items, 1):
        yield item
        if place % at_once == 0:
            await asyncio.sleep(0)
