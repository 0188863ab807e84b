"""An event loop whose clock jumps to the next timer: hours pass in no time, and a wait that nothing ends is found."""

import asyncio
import selectors
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Every task waits, and no timer will ever wake one."""


class _Selector(selectors.SelectSelector):
    """Moves the clock where a real one waits. Nothing but the loop's own wake-up pipe is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.now = time.monotonic()  # defaults of dataclasses keep the real clock

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("no task can go on")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time.monotonic` has to be `time` of this loop while it runs, see `run`."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return the result of `main` in virtual time. The clock is virtual for the whole process meanwhile."""
    loop = VirtualLoop()
    with _monotonic_is(loop.time):
        try:
            return loop.run_until_complete(main())
        finally:
            loop.run_until_complete(_cancelled(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


async def _cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _monotonic_is(clock: Callable[[], float]) -> Iterator[None]:
    """Replace the clock of all waits, of the gateway's rooms and of others."""
    real = time.monotonic
    setattr(time, "monotonic", clock)  # noqa: B010  # mypy takes no assignment to a function
    try:
        yield
    finally:
        setattr(time, "monotonic", real)  # noqa: B010
