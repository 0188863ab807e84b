"""Writes the ledger's file on a thread of its own, many writes in one transaction.

A write that fails, or takes too long, ends the file: it lacks writes from then on, so it is removed. Its callers go on
without it. A file that has reached its bound is no failure: the submission that takes the most room leaves it.
"""

import asyncio
import os
import queue
import sqlite3
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from gateway.ledger.batches import BatchFiles, BatchRow
from gateway.ledger.file import LedgerFile, SubmissionRow, batch_folder

log = structlog.get_logger()

Work = Callable[[LedgerFile], None]

_DISK = Path("/var/tmp")
_LINGER_S = 0.005
_STUCK_S = 5.0
_LOCKED_S = 5.0
_READ_S = 30.0
_LOOK_S = 0.1
_CLOSE_S = 10.0
_SUFFIXES = ("", "-wal", "-shm")
_PRIMARY = 0xFF  # of SQLite's extended codes
_NO_ROOM = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_TOOBIG})
_PASSING = frozenset({
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PROTOCOL,
})  # fmt: skip


def default_file(app: str) -> Path:
    """The default ledger of an app: on the host's disk, which a restart of the machine leaves."""
    place = _DISK if _DISK.is_dir() else Path(tempfile.gettempdir())
    return place / f"rollout-gateway-{os.getuid()}-{app}" / "ledger.sqlite"


def remove_unless_needed(path: Path) -> int:
    """Remove the file of a gateway that has ended, if no submission is in it. Return the number of submissions.

    Raise `sqlite3.Error` where another process has it open or it is damaged, and `OSError`.
    """
    file = LedgerFile(path, max_bytes=0)
    try:
        left = file.num_submissions
    finally:
        file.close()
    if left == 0:
        _unlink(path)
        with suppress(OSError):  # a damaged file that was moved aside is there too
            path.parent.rmdir()
    return left


class Ledger:
    """One file. Belongs to the loop that opens it."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.failure = ""
        """Why nothing is written any more; "" while all is."""
        self.life = 0
        self.submissions: list[SubmissionRow] = []
        """The submissions that the file had when it was opened."""
        self.batches: list[BatchRow] = []
        self.last_number = 0
        """The largest number of a submission that the file has had when it was opened."""
        self.outgrown: list[int] = []
        """Numbers of submissions that left the file as it had no room for them, until their user has taken note."""
        self._max_bytes = max_bytes
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._waiting: deque[Callable[[], None]] = deque()
        self._moved_at = 0.0  # when the thread last began or ended a write
        self._file: LedgerFile | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop

    @property
    def is_at_work(self) -> bool:
        """True while the thread may still touch the file."""
        return self._thread is not None and self._thread.is_alive()

    async def open(self) -> None:
        """Read the file. A damaged file is moved aside; a file that cannot be read now stays, and sets `failure`."""
        self._loop = asyncio.get_running_loop()
        deadline = self._loop.time() + _LOCKED_S
        while True:
            try:
                if not await self._loaded():
                    return
                break
            except sqlite3.OperationalError as error:
                if not _is_locked(error):
                    self._end(f"{self.path} cannot be opened: {error}")
                    return
                if self._loop.time() > deadline:
                    self._end(f"{self.path}: another process has it open; set another gateway.ledger or name")
                    return
                await asyncio.sleep(_LOOK_S)
            except (sqlite3.Error, OSError) as error:
                self._end(f"{self.path} cannot be opened: {error}")
                return
        self._thread = threading.Thread(target=self._write_all, name="ledger", daemon=True)
        self._thread.start()

    def let_go(self) -> None:
        """Forget what the file had: its users have it."""
        self.submissions, self.batches = [], []

    def put(self, work: Work, then: Callable[[], None]) -> None:
        """Have `work` done in its turn, then call `then` on the loop; at once if nothing is written any more."""
        if self.failure:
            then()
            return
        if not self._waiting:
            self._moved_at = time.monotonic()
        self._waiting.append(then)
        self._works.put(work)

    def look(self) -> None:
        """Give up a file whose disk hangs: one small write does not end. Many writes that wait are only slow."""
        if self._waiting and time.monotonic() - self._moved_at > _STUCK_S:
            self._end(f"{self.path} took no write within {_STUCK_S:g} s")

    async def close(self) -> None:
        """Write what waits."""
        self._works.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _CLOSE_S)

    async def _loaded(self) -> bool:
        """Load the file in time. A disk that hangs keeps a thread, which nobody waits for."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._load_for, args=(done,), name="read the ledger", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(_READ_S):
                await done
        except TimeoutError:
            self._end(f"{self.path} was not read within {_READ_S:g} s")
        return not self.failure

    def _load_for(self, done: "asyncio.Future[None]") -> None:
        try:
            self._load()
        except Exception as error:
            self._call(partial(_fail, done, error))
        else:
            self._call(partial(self._has_loaded, done))

    def _has_loaded(self, done: "asyncio.Future[None]") -> None:
        if not done.done():
            done.set_result(None)
        elif self._file is not None:  # too late
            self._file.close()

    def _load(self) -> None:
        try:
            self._read()
        except Exception as error:  # damage raises errors of many kinds
            if not _is_damage(error):
                raise
            aside = self.path.with_name(f"{self.path.name}.damaged")
            self.path.replace(aside)
            for suffix in _SUFFIXES[1:]:
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            log.error("the ledger cannot be read: its submissions are unknown", kept=str(aside), error=str(error))
            self._read()

    def _read(self) -> None:
        file = LedgerFile(self.path, self._max_bytes)
        try:
            file.begin()
            self.life = file.begin_life(int(time.time()))
            self.submissions, self.batches = file.load(), file.load_batches()
            self.last_number = file.last_number
            file.commit()
        except BaseException:
            file.close()
            raise
        self._file = file

    def _write_all(self) -> None:
        assert self._file is not None
        try:
            while self._write_batch(self._file):
                pass
            self._file.close()
        except Exception as error:  # nobody would see the error of a thread
            self._remove(self._file)
            self._call(partial(self._end, f"{self.path}: {error!r}"))
        else:
            if self.failure:
                self._remove(self._file)

    def _write_batch(self, file: LedgerFile) -> bool:
        """Write what waits. Return False at the end."""
        works = [self._works.get()]
        time.sleep(_LINGER_S)
        while not self._works.empty():
            works.append(self._works.get())
        self._moved_at = time.monotonic()
        done = [work for work in works if work is not None]
        if done:
            self._write(file, done)
        self._call(partial(self._written, len(done)))
        while self._works.empty() and (file.sweep() or file.shrink()):
            self._moved_at = time.monotonic()
        return None not in works and not self.failure

    def _write(self, file: LedgerFile, works: Sequence[Work]) -> None:
        """Write together, all or nothing, with the largest submissions gone where there is no room."""
        while True:
            try:
                file.begin()
                for work in works:
                    work(file)
                    self._moved_at = time.monotonic()
                file.commit()
                return
            except (sqlite3.OperationalError, sqlite3.DataError) as error:
                if error.sqlite_errorcode & _PRIMARY not in _NO_ROOM:
                    raise
                file.roll_back()
                if not self._has_made_room(file):
                    raise

    def _has_made_room(self, file: LedgerFile) -> bool:
        if file.sweep():
            return True
        number = file.drop_largest() if file.is_at_bound else None
        if number is not None:
            self._call(partial(self._outgrew, number))
        return number is not None

    def _outgrew(self, number: int) -> None:
        self.outgrown.append(number)

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(function)

    def _written(self, number: int) -> None:
        for _ in range(min(number, len(self._waiting))):
            self._waiting.popleft()()

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

    def _remove(self, file: LedgerFile) -> None:
        """Remove a file that lacks writes, and would have a later gateway deliver from it what was acked."""
        try:
            file.close()
            _unlink(self.path)
        except (sqlite3.Error, OSError) as error:
            log.error("a ledger that lacks writes cannot be removed", path=str(self.path), error=str(error))


def _fail(done: "asyncio.Future[None]", error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


def _unlink(path: Path) -> None:
    for suffix in _SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    BatchFiles(batch_folder(path)).remove()


def _is_damage(error: Exception) -> bool:
    """True unless the disk, the system or another process keeps the file from being read now."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return not isinstance(error, OSError) and code & _PRIMARY not in _PASSING


def _is_locked(error: sqlite3.Error) -> bool:
    return "locked" in str(error)
