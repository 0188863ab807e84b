"""Calls at the same time, of which the first failure ends the others, and a call that its caller cannot leave."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

_BEGUN_AT_ONCE = 16  # before others get their turn on the loop


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
