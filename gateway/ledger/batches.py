"""The ledger's records of batches of /v1/completions: a file each, which grows at its end, in a folder beside SQLite's.

SQLite takes 20 times the CPU for them: their chunks are large, short-lived, and never looked up. The methods are
called by the ledger's thread, which has SQLite's lock.
"""

import os
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LONGEST_GAP_S = 600.0
"""Age of its last part beyond which no client waits for a batch: blind replays end within minutes."""
_LENGTH = struct.Struct(">I")
_OWNER_ONLY = 0o600


@dataclass(slots=True)
class BatchRow:
    """A batch as its file has it: its request with the body as it came, and what was made, oldest first."""

    number: int
    request: bytes
    body: bytes
    parts: list[bytes] = field(default_factory=list)


class BatchFiles:
    """The files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, row: BatchRow) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._append(row.number, (row.request, row.body, *row.parts))

    def grow(self, number: int, content: bytes) -> None:
        self._append(number, (content,))

    def forget(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def load(self) -> list[BatchRow]:
        """Return the batches in the order of their numbers. A last part that a kill has cut is removed, and so are
        batches for which no client waits any more."""
        if not self._folder.is_dir():
            return []
        rows = []
        for number in sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()):
            path = self._path(number)
            frames = list(_frames(path.read_bytes()))
            if len(frames) < 2 or time.time() - path.stat().st_mtime > _LONGEST_GAP_S:
                self.forget(number)
                continue
            os.truncate(path, sum(_LENGTH.size + len(frame) for frame in frames))  # it grows again
            rows.append(BatchRow(number, frames[0], frames[1], frames[2:]))
        return rows

    def remove(self) -> None:
        """Remove all."""
        if self._folder.is_dir():
            shutil.rmtree(self._folder)

    def _append(self, number: int, contents: Sequence[bytes]) -> None:
        file = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, _OWNER_ONLY)
        with open(file, "ab") as end:
            for content in contents:
                end.write(_LENGTH.pack(len(content)))
                end.write(content)

    def _path(self, number: int) -> Path:
        return self._folder / str(number)


def _frames(content: bytes) -> Iterator[bytes]:
    place = 0
    while place + _LENGTH.size <= len(content):
        [length] = _LENGTH.unpack_from(content, place)
        place += _LENGTH.size
        if place + length > len(content):
            return
        yield content[place : place + length]
        place += length
