"""The records of a ledger: a file each, which grows at its end, in a folder that one process holds.

A frame is a length, a check sum, and a value in msgpack. What a kill has cut off at the end of a file was not durable.
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

Frame = msgspec.Struct

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

    @property
    def num_bytes(self) -> int:
        return sum(_HEAD.size + len(frame) for frame in self.frames)


class Folder:
    """The files. Its methods block."""

    def __init__(self, path: Path) -> None:
        """Open or create the folder. Raise `BlockingIOError` where another process holds it, and `OSError`."""
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_parent(path.parent)
        if path.is_file():  # earlier releases had an SQLite file
            path.replace(path.with_name(f"{path.name}.old"))
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

    def begin_life(self, least: int) -> int:
        """Return the number of this life: more than any before, and at least `least`."""
        before = os.pread(self._lock, 32, 0)
        life = max(least, int(before) + 1 if before.isdigit() else 0)
        os.pwrite(self._lock, str(life).encode(), 0)
        return life

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
            found = Left(name, list(_frames(content)), time.time() - path.stat().st_mtime)
            left.append(found)
            if surplus := len(content) - found.num_bytes:
                log.warning("a record ends with what cannot be read", file=str(path), bytes=surplus)
                os.truncate(path, found.num_bytes)
        return left

    def replace(self, name: str, frames: Sequence[Frame]) -> int:
        """Rewrite a record, all or nothing. Return its size."""
        new = self.path / f"{name}{_NEW}"
        num_bytes = _write(new, os.O_CREAT | os.O_TRUNC, frames)
        new.replace(self.path / name)
        return num_bytes

    def append(self, name: str, frames: Sequence[Frame]) -> int:
        """Write at the end of a record. Return the size of that."""
        return _write(self.path / name, os.O_APPEND, frames)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path)


def _write(path: Path, flags: int, frames: Sequence[Frame]) -> int:
    num_bytes = 0
    with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o600), "wb") as file:
        for frame in frames:
            content = msgspec.msgpack.encode(frame)
            num_bytes += file.write(_HEAD.pack(len(content), crc32(content))) + file.write(content)
    return num_bytes


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
