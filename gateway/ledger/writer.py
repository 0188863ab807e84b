"""Writes the ledger's folder on a thread of its own.

A write that fails, or takes too long, ends the folder: it lacks writes from then on, so it is removed. Callers go on
without it.
"""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from gateway.ledger.folder import Folder, Left

log = structlog.get_logger()

Work = Callable[[Folder], None]

_LINGER_S = 0.005
_STUCK_S = 5.0
_LOCKED_S = 25.0  # a gateway that ends closes connections first
_READ_S = 30.0
_LOOK_S = 0.1
_CLOSE_S = 10.0


class Writer:
    """One folder. Belongs to the loop that opens it."""

    def __init__(self, path: Path, least_life: int) -> None:
        self.path = path
        self.failure = ""
        """Why nothing is written any more; "" while all is."""
        self.life = least_life
        """Number of this life of the gateway: more than any that has written here before."""
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._waiting: deque[Callable[[], None]] = deque()
        self._moved_at = 0.0  # when the thread last began or ended a write
        self._is_read = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop

    async def open(self) -> list[Left]:
        """Return what the folder has. Set `failure` where it cannot be read now: a disk that hangs keeps the thread."""
        self._loop = asyncio.get_running_loop()
        opening: asyncio.Future[list[Left]] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(opening,), name="ledger", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(_READ_S):
                left = await opening
        except TimeoutError:
            self._end(f"{self.path} was not read within {_READ_S:g} s")
        except BlockingIOError:
            self._end(f"{self.path}: another process has it open; set another gateway.ledger or name")
        except Exception as error:
            self._end(f"{self.path} cannot be opened: {error}")
        else:
            self._is_read = True
            return left
        return []

    def put(self, work: Work, then: Callable[[], None]) -> None:
        """Have `work` done in its turn, then call `then` on the loop; at once if nothing is written any more."""
        if self.failure:
            then()
            return
        if not self._waiting:
            self._moved_at = time.monotonic()
        self._waiting.append(then)
        self._works.put(work)

    def check(self) -> None:
        """Give up a folder whose disk hangs: one small write does not end. Many writes that wait are only slow."""
        if self._waiting and time.monotonic() - self._moved_at > _STUCK_S:
            self._end(f"{self.path} took no write within {_STUCK_S:g} s")

    async def close(self) -> None:
        """Write what waits."""
        self._works.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _CLOSE_S)

    def _run(self, opening: "asyncio.Future[list[Left]]") -> None:
        """Read, then write until the end."""
        try:
            folder = self._held()
        except Exception as error:
            self._call(partial(self._failed, opening, error))
            return
        try:
            self.life = folder.begin_life(self.life)
            self._call(partial(_succeed, opening, folder.load()))
            while self._write_some(folder):
                pass
        except Exception as error:  # nobody would see the error of a thread
            self._call(partial(self._failed, opening, error))
            self._clear(folder, lacks_writes=self._is_read)
        else:
            self._clear(folder, lacks_writes=self._is_read and bool(self.failure))
        finally:
            folder.close()

    def _held(self) -> Folder:
        deadline = time.monotonic() + _LOCKED_S
        while True:
            try:
                return Folder(self.path)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_S)

    def _write_some(self, folder: Folder) -> bool:
        """Write what waits. Return False at the end."""
        works = [self._works.get()]
        time.sleep(_LINGER_S)
        while not self._works.empty():
            works.append(self._works.get())
        done = [work for work in works if work is not None]
        for work in done:
            self._moved_at = time.monotonic()
            work(folder)
        self._call(partial(self._written, len(done)))
        return len(done) == len(works) and not self.failure

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(function)

    def _written(self, number: int) -> None:
        for _ in range(min(number, len(self._waiting))):
            self._waiting.popleft()()

    def _failed(self, opening: "asyncio.Future[list[Left]]", error: Exception) -> None:
        if opening.done():
            self._end(f"{self.path}: {error!r}")
        else:
            opening.set_exception(error)

    def _end(self, reason: str) -> None:
        """Write nothing any more. Those who wait go on."""
        if self.failure:
            return
        self.failure = reason
        log.error("the ledger is not kept: rollouts go on, and a restart of the gateway loses them", reason=reason)
        self._works.put(None)
        waiting, self._waiting = self._waiting, deque()
        for then in waiting:
            then()

    def _clear(self, folder: Folder, *, lacks_writes: bool) -> None:
        """Remove a folder from which a later gateway would deliver what was acked."""
        if not lacks_writes:
            return
        try:
            folder.clear()
        except OSError as error:
            log.error("a ledger that lacks writes cannot be removed", path=str(self.path), error=str(error))


def _succeed(opening: "asyncio.Future[list[Left]]", left: list[Left]) -> None:
    if not opening.done():
        opening.set_result(left)
