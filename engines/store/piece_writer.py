"""The process of `pieces.py`, as its owner sees it."""

import contextlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engines.errors import StoreFailed
from engines.store import pieces
from engines.store.pieces import HEAD
from engines.store.tensor_file import Undigested, layout

_END_S = 5.0


class PieceWriter:
    """The process, and `memory` that it shares. Writes one file at a time, and of no further one after an error."""

    def __init__(self, num_bytes: int) -> None:
        descriptor = os.memfd_create("pieces")
        try:
            os.ftruncate(descriptor, num_bytes)
            self.memory = mmap.mmap(descriptor, num_bytes)
            self._process = subprocess.Popen(
                [sys.executable, "-P", pieces.__file__, str(descriptor)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor], text=True,
            )  # fmt: skip
        finally:
            os.close(descriptor)

    def begin(self, path: Path, tensors: Sequence[Undigested]) -> None:
        """Begin a file of these tensors."""
        head, sizes, wanted = layout(tensors)
        self._say({"path": str(path), "head": head.decode(HEAD), "sizes": sizes, "wanted": wanted})

    def add(self, begin: int, num_bytes: int) -> None:
        """Append these bytes of `memory`, which `answer` says are written."""
        self._say([begin, num_bytes])

    def answer(self) -> list[str]:
        """Wait until the oldest bytes are written, or, behind all, for what `write_pieces` returns.

        Raises `OSError` where the file cannot be written, `StoreFailed` where the process has ended.
        """
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise StoreFailed("the process that writes versions to the weight store has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(answer["errno"], answer["error"])
        return list(answer["digests"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk that hangs
            self._process.communicate(timeout=_END_S)

    def _say(self, words: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` has the reason
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
