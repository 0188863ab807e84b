"""An event loop whose clock jumps to the next timer: hours pass in no time, and a wait that nothing ends is found."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest.mock import patch

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
    """`time.monotonic` has to be patched with `time` of this loop, see `run`."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return the result of `main` in virtual time. Blocking calls given to threads are made at once, in this thread."""
    loop = VirtualLoop()
    with patch.object(time, "monotonic", loop.time):
        try:
            return loop.run_until_complete(main())
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
