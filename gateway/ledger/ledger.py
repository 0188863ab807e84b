"""The ledger of one gateway as its users share it, and the thread that writes its folder.

A write that fails, or takes too long, ends the ledger. It lacks writes from then on, and a later gateway would deliver
from it what was acked, so its folder is removed. Users go on without it.
"""

import asyncio
import os
import queue
import secrets
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from gateway.ledger.folder import Folder, Left, Step

log = structlog.get_logger()

Work = Callable[[Folder], None]
Opening = asyncio.Future[list[Left]]

_DISK = Path("/var/tmp")
_TICK_S = 0.05  # readers tell what they have once a second, and all of it together
_LINGER_S = 0.005
_LOOK_S = 0.1
_WATCH_S = 0.5
_STUCK_S = 5.0
_LOCKED_S = 25.0  # a gateway that ends closes connections first
_READ_S = 30.0
_CLOSE_S = 10.0


def default_folder(app: str) -> Path:
    """The default ledger of an app: on the host's disk, which a restart of the machine leaves."""
    place = _DISK if _DISK.is_dir() else Path(tempfile.gettempdir())
    return place / f"rollout-gateway-{os.getuid()}-{app}" / "ledger"


def remove_unless_needed(path: Path, *kinds: str) -> int:
    """Remove the ledger of a gateway that has ended, if it has no record of these kinds. Return the number of these.

    Raise `BlockingIOError` where another process has it open, and `OSError`.
    """
    with closing(Folder(path)) as folder:
        left = sum(name.startswith(kinds) for name in folder.names)
        if not left:
            folder.clear()
            with suppress(OSError):  # it has something else
                path.parent.rmdir()
    return left


class User(Protocol):
    """Keeps records in the ledger."""

    @property
    def kind(self) -> str:
        """What the names of its records begin with."""

    def bring_back(self, left: Sequence[Left]) -> None:
        """Go on with what a gateway before this one has left."""


class Ledger:
    """The records of all users, opened once; None for the path keeps none."""

    def __init__(self, path: Path | None) -> None:
        self.is_on = path is not None
        """False where none is configured."""
        self._path = path or Path()
        self._failure = ""
        self._users: list[User] = []
        self._grown: dict[Record, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._waiting: deque[Callable[[], None]] = deque()
        self._moved_at = 0.0  # when the thread last began or ended a write
        self._is_read = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop

    @property
    def is_durable(self) -> bool:
        """True if what is written outlives the gateway."""
        return self._is_read and not self._failure

    def report(self) -> dict[str, object]:
        """The state for /status. `unwritten` are the records with news, and the writes on their way."""
        return {
            "file": str(self._path) if self.is_on else None,
            "durable": self.is_durable,
            "failure": self._failure,
            "unwritten": len(self._grown) + len(self._waiting),
        }

    def add(self, user: User) -> None:
        self._users.append(user)

    # Writes

    def put(self, work: Work, then: Callable[[], None]) -> None:
        """Have `work` done in its turn, then call `then`; at once where nothing is written."""
        if not self.is_durable:
            then()
            return
        if not self._waiting:
            self._moved_at = time.monotonic()
        self._waiting.append(then)
        self._works.put(work)

    async def written(self) -> None:
        """Return once all is written that was put before."""
        done = asyncio.Event()
        self.put(lambda folder: None, done.set)
        await done.wait()

    def note(self, record: "Record") -> None:
        """Have what a record's parts have got written soon."""
        if self.is_durable:
            self._grown[record] = None
            if self._timer is None:
                self._timer = self._loop.call_later(_TICK_S, self._write_growth)

    def _write_growth(self) -> None:
        self._timer, grown, self._grown = None, self._grown, {}
        for record in grown:
            if record.is_writing:  # a slow disk gets more at a time
                self.note(record)
            else:
                record.write_growth()

    # Life

    async def open(self) -> None:
        """Have users go on with what a gateway before this one has left, before a client comes. What cannot be read now
        is left as it is, and nothing is written: a disk that hangs keeps the thread alone."""
        if not self.is_on:
            return
        self._loop = asyncio.get_running_loop()
        opening: Opening = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(opening,), name="ledger", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(_READ_S):
                left = await opening
        except TimeoutError:
            self._end(f"{self._path} was not read within {_READ_S:g} s")
        except BlockingIOError:
            self._end(f"{self._path}: another process has it open; set another gateway.ledger or name")
        except Exception as error:
            self._end(f"{self._path} cannot be opened: {error}")
        else:
            self._is_read = True
            for user in self._users:
                user.bring_back([one for one in left if one.name.startswith(user.kind)])
            for one in left:
                if not one.name.startswith(tuple(user.kind for user in self._users)):
                    log.warning("a record of another release is dropped", record=one.name)
                    Record(self, one.name).remove()

    async def run(self) -> None:
        """Give up a folder whose disk hangs: one small write does not end. Many writes that wait are only slow."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._waiting and time.monotonic() - self._moved_at > _STUCK_S:
                self._end(f"{self._path} took no write within {_STUCK_S:g} s")

    async def close(self) -> None:
        """Write what waits."""
        self._works.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _CLOSE_S)

    def _end(self, reason: str) -> None:
        """Write nothing any more. Those who wait go on."""
        if self._failure:
            return
        self._failure = reason
        log.error("the ledger is not kept: rollouts go on, and a restart of the gateway loses them", reason=reason)
        self._works.put(None)
        waiting, self._waiting = self._waiting, deque()
        for then in waiting:
            then()

    # Thread

    def _run(self, opening: Opening) -> None:
        """Read, then write until the end."""
        try:
            folder = _held(self._path)
        except Exception as error:
            self._call(partial(self._failed, opening, error))
            return
        with closing(folder):
            lacks_writes = True
            try:
                self._call(partial(_succeed, opening, folder.load()))
                while self._write_some(folder):
                    pass
                lacks_writes = bool(self._failure)
            except Exception as error:  # nobody would see the error of a thread
                self._call(partial(self._failed, opening, error))
            if lacks_writes and self._is_read:
                self._clear(folder)

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
        return len(done) == len(works) and not self._failure

    def _clear(self, folder: Folder) -> None:
        try:
            folder.clear()
        except OSError as error:
            log.error("a ledger that lacks writes cannot be removed", path=str(self._path), error=str(error))

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(function)

    def _written(self, number: int) -> None:
        for _ in range(min(number, len(self._waiting))):
            self._waiting.popleft()()

    def _failed(self, opening: Opening, error: Exception) -> None:
        if opening.done():
            self._end(f"{self._path}: {error!r}")
        else:
            opening.set_exception(error)


def _held(path: Path) -> Folder:
    """The folder, once the gateway before this one has let it go. Raise `BlockingIOError`, `OSError`."""
    deadline = time.monotonic() + _LOCKED_S
    while True:
        try:
            return Folder(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S)


def _nothing(part: int) -> Iterable[Step]:
    return ()


def _succeed(opening: Opening, left: list[Left]) -> None:
    if not opening.done():
        opening.set_result(left)


class Record:
    """One record as its user writes it. Nothing is written before `begin`, nor after `remove`.

    `growth_of` is asked for what a part, of this number, has got: soon after `grew`, until `remove`.
    """

    def __init__(self, ledger: Ledger, name: str, *, is_kept: bool = True) -> None:
        """`name` is that of a record which the ledger has, unless it is not kept yet."""
        self.name = name
        self.is_kept = is_kept
        """True from `begin` to `remove`."""
        self.growth_of: Callable[[int], Iterable[Step]] = _nothing
        self._ledger = ledger
        self._grown: dict[int, None] = {}
        self._num_writing = 0

    @classmethod
    def new(cls, ledger: Ledger, kind: str) -> "Record":
        """Return a record that has not begun."""
        return cls(ledger, f"{kind}-{secrets.token_hex(8)}", is_kept=False)

    @property
    def is_writing(self) -> bool:
        return self._num_writing > 0

    def begin(self, head: Step) -> None:
        """Begin the record anew with its head."""
        self.is_kept = True
        self._put(lambda folder: folder.replace(self.name, head))
        if self._grown:
            self._ledger.note(self)

    def add(self, *steps: Step) -> None:
        """Write at the record's end."""
        if self.is_kept:
            self._put(lambda folder: folder.append(self.name, steps))

    def grew(self, part: int) -> None:
        """Have what a part has got written soon."""
        if not self._grown and self.is_kept:
            self._ledger.note(self)
        self._grown[part] = None

    def write_growth(self) -> None:
        """Write what parts have got."""
        grown, self._grown = self._grown, {}
        if steps := [step for part in grown for step in self.growth_of(part)]:
            self.add(*steps)

    async def written(self) -> None:
        """Return once the ledger has all that was put before."""
        await self._ledger.written()

    def remove(self) -> None:
        self._grown.clear()
        self.growth_of = _nothing  # a large user is to be free at once
        if self.is_kept:
            self.is_kept = False
            self._put(lambda folder: folder.remove(self.name))

    def _put(self, work: Work) -> None:
        self._num_writing += 1
        self._ledger.put(work, self._wrote)

    def _wrote(self) -> None:
        self._num_writing -= 1
