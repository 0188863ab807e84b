"""Writes small files beside the event loop: their disk may hang, as a remote one does, and no token waits for it."""

import threading
from collections import deque
from collections.abc import Callable

import structlog

log = structlog.get_logger()

_MOST_WAITING = 1000
"""While a disk hangs, the oldest of more are forgotten."""


class FileWriter:
    """Runs writes in their order, on a thread that ends when none is left."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque(maxlen=_MOST_WAITING)
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()

    def add(self, write: Callable[[], None]) -> None:
        """Run `write` soon. It should raise nothing: an error is logged, and the next write follows."""
        with self._lock:
            self._waiting.append(write)
            if not self._idle.is_set():
                return
            try:
                threading.Thread(target=self._run, name="file writer", daemon=True).start()
            except RuntimeError as error:  # this process may have no more threads
                log.warning("a file is written later", error=str(error))
            else:
                self._idle.clear()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, at most so long. Return False where it is not."""
        return self._idle.wait(timeout_s) and not self._waiting

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._idle.set()
                    return
                write = self._waiting.popleft()
            try:
                write()
            except Exception:
                log.exception("a file is not written")
