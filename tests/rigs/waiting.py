"""Waits of tests without an event loop."""

import time
import urllib.error
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float) -> None:
    """Return as soon as the condition holds. A server that is not reached is asked again."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.02)
