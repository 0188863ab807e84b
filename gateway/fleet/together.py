"""Calls at the same time, of which the first failure ends the others."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all calls, in their order. Raise the error of the first call that fails."""
    begun = list(calls)
    if len(begun) == 1:  # without a task of its own
        return [await begun[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in begun]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
