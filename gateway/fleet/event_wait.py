"""A bounded wait for an event."""

import asyncio


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event, at most so long. Return False where it was not set in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False
