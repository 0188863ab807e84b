"""The records of a ledger: a file each, which grows at its end, in a folder that one process holds.

A frame is what was written at once: a length, a check sum, and in msgpack the record's head, or a list of later steps.
What a kill has cut off at the end of a file was not durable.
"""

import fcntl
import os
import shutil
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import msgspec
import structlog

log = structlog.get_logger()

Step = msgspec.Struct

_HEAD = struct.Struct(">II")
_LOCK = "lock"
_NEW = ".new"
_ROOT = 0


@dataclass(frozen=True, slots=True)
class Left:
    """A record that a process before this one has left: its frames, and the time since it was written."""

    name: str
    frames: list[bytes]
    age_s: float


class Folder:
    """The files. Its methods block."""

    def __init__(self, path: Path) -> None:
        """Open or create the folder. Raise `BlockingIOError` where another process holds it, and `OSError`."""
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_parent(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        _check_owner(path, os.getuid())
        path.chmod(0o700)
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Let another process hold the folder."""
        os.close(self._lock)

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir() if path.name != _LOCK and path.suffix != _NEW)

    def load(self) -> list[Left]:
        """Return all records, each as far as it can be read. What cannot be read is dropped from its file."""
        left = []
        for unfinished in self.path.glob(f"*{_NEW}"):
            unfinished.unlink()
        for name in self.names:
            path = self.path / name
            content = path.read_bytes()
            frames = list(_frames(content))
            left.append(Left(name, frames, time.time() - path.stat().st_mtime))
            if surplus := len(content) - sum(_HEAD.size + len(frame) for frame in frames):
                log.warning("a record ends with what cannot be read", file=str(path), bytes=surplus)
                os.truncate(path, len(content) - surplus)
        return left

    def replace(self, name: str, head: Step) -> None:
        """Begin a record anew, all or nothing."""
        new = self.path / f"{name}{_NEW}"
        _write(new, os.O_CREAT | os.O_TRUNC, head)
        new.replace(self.path / name)

    def append(self, name: str, steps: Sequence[Step]) -> None:
        """Write at the end of a record."""
        _write(self.path / name, os.O_APPEND, steps)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path)


def _write(path: Path, flags: int, value: Step | Sequence[Step]) -> None:
    content = msgspec.msgpack.encode(value)
    with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o600), "wb") as file:
        file.write(_HEAD.pack(len(content), crc32(content)))
        file.write(content)


def _frames(content: bytes) -> Iterator[bytes]:
    place = 0
    while place + _HEAD.size < len(content):
        length, check = _HEAD.unpack_from(content, place)
        place += _HEAD.size
        frame = content[place : place + length]
        if not length or len(frame) < length or crc32(frame) != check:
            return
        yield frame
        place += length


def _check_parent(folder: Path) -> None:
    """Raise `PermissionError` where another user could replace what is in a folder."""
    _check_owner(folder, os.getuid(), _ROOT)
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(f"all users may replace files in {folder}: set gateway.ledger to a folder elsewhere")


def _check_owner(path: Path, *owners: int) -> None:
    """Raise `PermissionError` where another user could have made it."""
    for found in (path.lstat().st_uid, path.stat().st_uid):
        if found not in owners:
            raise PermissionError(f"{path} belongs to user {found}: set gateway.ledger to a folder of your own")
