"""Waits and calls on the event loop: bounded waits, calls that end together."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from engines.errors import DeadlineExceeded

T = TypeVar("T")

_BEGUN_AT_ONCE = 16  # before others get their turn on the loop


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event, at most so long. Return False where it was not set in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


async def bounded(wait: Awaitable[T], timeout_s: float, what: str) -> T:
    """Return the result of `wait`. Raise `DeadlineExceeded` with `what` where it takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            return await wait
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what} within {timeout_s:g} s") from error


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all calls, in their order. Raise the error of the first call that fails."""
    waiting = deque(calls)
    if len(waiting) == 1:  # without a task of its own
        return [await waiting[0]]
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            while waiting:
                tasks.append(group.create_task(waiting.popleft()))
                if len(tasks) % _BEGUN_AT_ONCE == 0:
                    await asyncio.sleep(0)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for call in waiting:
            call.close()
    return [task.result() for task in tasks]


async def to_its_end(work: Awaitable[T]) -> T:
    """Return the result. Where the caller is cancelled, the work is done before that is raised."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
