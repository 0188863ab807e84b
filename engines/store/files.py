"""File operations of the weight store: locks, synced writes, whole reads."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from engines.errors import StoreFailed

THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Files read or written at a time; a core copies some GB/s from or to a file in memory."""


def try_lock(descriptor: int) -> bool:
    """True where the lock was taken; it ends with the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """True where another process holds the lock of this file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe of another user's has no end
    except OSError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Returns once a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_at(file: BinaryIO, place: memoryview, position: int) -> None:
    """Fills `place` with the file's bytes from this position on. Raises `OSError` where the file ends before."""
    while place:
        if not (got := os.preadv(file.fileno(), [place], position)):
            raise OSError(f"{file.name} ends before its header says")
        place, position = place[got:], position + got


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns errors of the file system into `StoreFailed`, with a remedy for a full disk."""
    try:
        yield
    except OSError as error:
        full = "; the disk of the weight store is full: make room, or name a larger one in weights.store"
        remedy = full if error.errno == errno.ENOSPC else ""
        raise StoreFailed(f"cannot write {path}: {error}{remedy}") from error
