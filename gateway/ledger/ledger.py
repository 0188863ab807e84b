"""The ledger of one gateway as its users share it: opened at the start, off from its first failure on."""

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from gateway.ledger.folder import Folder, Frame, Left
from gateway.ledger.writer import Work, Writer

_DISK = Path("/var/tmp")
_TICK_S = 0.05  # engines' chunks come less often, so most are written once, and soon after they came
_REST_S = 0.5


def default_folder(app: str) -> Path:
    """The default ledger of an app: on the host's disk, which a restart of the machine leaves."""
    place = _DISK if _DISK.is_dir() else Path(tempfile.gettempdir())
    return place / f"rollout-gateway-{os.getuid()}-{app}" / "ledger"


def remove_unless_needed(path: Path, *kinds: str) -> int:
    """Remove the ledger of a gateway that has ended, if it has no record of these kinds. Return the number of these.

    Raise `BlockingIOError` where another process has it open, and `OSError`.
    """
    folder = Folder(path)
    try:
        left = sum(name.startswith(kinds) for name in folder.names)
        if not left:
            folder.clear()
            with suppress(OSError):  # it has something else
                path.parent.rmdir()
    finally:
        folder.close()
    return left


class User(Protocol):
    """Keeps records in the ledger."""

    @property
    def kind(self) -> str:
        """What the names of its records begin with."""

    @property
    def is_busy(self) -> bool:
        """True while there may be news."""

    def write_news(self) -> None:
        """Write what is new."""

    def bring_back(self, left: Sequence[Left]) -> None:
        """Go on with what a gateway before this one has left."""


class Ledger:
    """The records of all users; None for the path keeps none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._users: list[User] = []
        self._writer: Writer | None = None
        self.life = int(time.time())
        """Number of this gateway's life, which grows."""

    @property
    def is_on(self) -> bool:
        """False where none is configured."""
        return self._path is not None

    @property
    def is_durable(self) -> bool:
        """True if what is written outlives the gateway."""
        return self._writer is not None and not self._writer.failure

    def report(self) -> dict[str, object]:
        """The state for /status."""
        failure = self._writer.failure if self._writer else ""
        return {"file": str(self._path) if self._path else None, "durable": self.is_durable, "failure": failure}

    def add(self, user: User) -> None:
        self._users.append(user)

    def put(self, work: Work, then: Callable[[], None]) -> None:
        """Have `work` done in its turn, then call `then`; at once where nothing is written."""
        if self._writer is None:
            then()
        else:
            self._writer.put(work, then)

    async def written(self) -> None:
        """Return once all is written that was put before."""
        done = asyncio.Event()
        self.put(lambda folder: None, done.set)
        await done.wait()

    async def open(self) -> None:
        """Have users go on with what a gateway before this one has left, before a client comes."""
        if self._path is None:
            return
        self._writer = Writer(self._path, self.life)
        left = await self._writer.open()
        self.life = self._writer.life
        for user in self._users:
            user.bring_back([one for one in left if one.name.startswith(user.kind)])

    async def run(self) -> None:
        """Have news written, and watch the disk."""
        while True:
            await asyncio.sleep(_TICK_S if any(user.is_busy for user in self._users) else _REST_S)
            for user in self._users:
                user.write_news()
            if self._writer is not None:
                self._writer.check()

    async def close(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            await self._writer.close()


class Record:
    """One record as its user writes it. Nothing is written before `begin`, nor after `remove`."""

    def __init__(self, ledger: Ledger, name: str, num_bytes: int = 0) -> None:
        """`name` is that of a record which the ledger has, of this size."""
        self.name = name
        self.num_bytes = num_bytes
        self.num_writing = 0
        """Writes on their way."""
        self._ledger = ledger
        self._is_kept = True
        self._first_bytes = 0

    @classmethod
    def new(cls, ledger: Ledger, kind: str) -> "Record":
        """Return a record that has not begun."""
        record = cls(ledger, f"{kind}-{secrets.token_hex(8)}")
        record._is_kept = False
        return record

    @property
    def is_kept(self) -> bool:
        """True from `begin` to `remove`."""
        return self._is_kept

    @property
    def has_doubled(self) -> bool:
        """True where it has twice the size with which it was rewritten."""
        return self.num_bytes > 2 * self._first_bytes

    def begin(self, frames: Sequence[Frame], then: Callable[[], None] | None = None) -> None:
        """Rewrite the record."""
        self._is_kept = True

        def work(folder: Folder) -> None:
            self.num_bytes = self._first_bytes = folder.replace(self.name, frames)

        self._put(work, then)

    def add(self, *frames: Frame, then: Callable[[], None] | None = None) -> None:
        """Write at the record's end, then call `then`; at once where the record is not kept."""
        if self._is_kept:
            self._put(lambda folder: self._append(folder, frames), then)
        elif then is not None:
            then()

    async def written(self) -> None:
        """Return once the ledger has all that was put before."""
        await self._ledger.written()

    def remove(self) -> None:
        if self._is_kept:
            self._is_kept, self.num_bytes = False, 0
            self._put(lambda folder: folder.remove(self.name), None)

    def _append(self, folder: Folder, frames: Sequence[Frame]) -> None:
        self.num_bytes += folder.append(self.name, frames)

    def _put(self, work: Work, then: Callable[[], None] | None) -> None:
        self.num_writing += 1
        self._ledger.put(work, lambda: self._wrote(then))

    def _wrote(self, then: Callable[[], None] | None) -> None:
        self.num_writing -= 1
        if then is not None:
            then()
