"""Bounded waiting for a condition."""

import time
from collections.abc import Callable

from engines.errors import DeadlineExceeded

_POLL_S = 0.5


def wait_until(condition: Callable[[], bool], timeout_s: float, awaited: str) -> None:
    """Raise `DeadlineExceeded` naming `awaited` when the condition does not hold in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"waited {timeout_s:.0f} s for {awaited}")
        time.sleep(_POLL_S)
