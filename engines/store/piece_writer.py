"""Writes files from shared memory, in a process of its own.

In an engine's process each call waits for its turn at Python's lock, and the engine's next step for that call.

    python -m engines.store.piece_writer FD      # PieceWriter starts it; it ends with its standard input
"""

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from engines.errors import StoreFailed
from engines.store.tensor_file import Undigested, write_file

_END_S = 5.0


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: Sequence[int]
    num_bytes: int
    digest: str


class PieceWriter:
    """The process, and `memory` that it shares. Writes one file at a time, and of no further one after an error."""

    def __init__(self, num_bytes: int) -> None:
        descriptor = os.memfd_create("pieces")
        try:
            os.ftruncate(descriptor, num_bytes)
            self.memory = mmap.mmap(descriptor, num_bytes)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engines.store.piece_writer", str(descriptor)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor], text=True,
            )  # fmt: skip
        finally:
            os.close(descriptor)

    def begin(self, path: Path, tensors: Sequence[Undigested]) -> None:
        """Begin a file of these tensors."""
        told = [[one.name, one.dtype, list(one.shape), one.num_bytes, one.digest] for one in tensors]
        self._say({"path": str(path), "tensors": told})

    def add(self, begin: int, num_bytes: int) -> None:
        """Append these bytes of `memory`, which `answer` says are written."""
        self._say([begin, num_bytes])

    def answer(self) -> list[str]:
        """Wait until the oldest bytes are written, or, behind all, for the digests of the file's tensors.

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
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` has the reason


def _pieces(said: TextIO, memory: memoryview, num_bytes: int) -> Iterator[memoryview]:
    """Yield a file's pieces; tell that each is written once the next is asked for."""
    while num_bytes:
        begin, length = json.loads(said.readline())
        yield memory[begin : begin + length]
        num_bytes -= length
        _tell({"digests": []})


def _tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _serve(descriptor: int, said: TextIO) -> None:
    memory = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    while line := said.readline():
        told = json.loads(line)
        tensors = [_Tensor(*one) for one in told["tensors"]]
        pieces = _pieces(said, memory, sum(tensor.num_bytes for tensor in tensors))
        try:
            _tell({"digests": write_file(Path(told["path"]), tensors, pieces)})
        except OSError as error:
            _tell({"errno": error.errno, "error": error.strerror})
            return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's process ends it
    _serve(int(sys.argv[1]), sys.stdin)
