"""Writes tensors of a GPU to files, beside an engine whose next step is prepared in the same process."""

import contextlib
import json
import mmap
import os
import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch

from engines.errors import StoreFailed
from engines.store import pieces
from engines.store.draft import RawTensor, write_host_file
from engines.store.pieces import HEAD
from engines.store.tensor_file import Undigested, digests_of, layout

_END_S = 5.0
_PIECE_BYTES = 128 << 20
"""As much leaves a GPU at a time: few calls, as each waits for the engine's own Python, and holds it up."""
WRITERS = 2
"""Files written at a time. More are no faster where the file system is memory, and take cores from the engine."""


class PieceWriter:
    """The process of `store/pieces.py`, and `memory` that it shares. Writes one file at a time, and of no further one
    after an error."""

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


class GpuFiles:
    """Pinned memory and the process that writes from it, made once: to pin memory stops an engine for up to 1.4 s."""

    _free: ClassVar[queue.SimpleQueue["GpuFiles"]] = queue.SimpleQueue()

    def __init__(self, device: torch.device) -> None:
        self._writer = PieceWriter(2 * _PIECE_BYTES)
        self._memory = torch.frombuffer(self._writer.memory, dtype=torch.uint8)
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cudart: Any = torch.cuda.cudart() if device.type == "cuda" else None
        if self._cudart is not None:
            torch.cuda.check_error(self._cudart.cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0))

    @classmethod
    @contextlib.contextmanager
    def taken(cls, device: torch.device) -> Iterator["GpuFiles"]:
        """Have one for this block. One that fails is not used again."""
        try:
            way = cls._free.get_nowait()
        except queue.Empty:
            way = cls(device)
        try:
            yield way
        except BaseException:
            way.close()
            raise
        cls._free.put(way)

    @classmethod
    def prepare(cls, device: torch.device) -> None:
        """Make as many as are used at a time."""
        for _ in range(WRITERS - cls._free.qsize()):
            cls._free.put(cls(device))

    def close(self) -> None:
        self._writer.close()
        if self._cudart is not None:  # the next memory may be at the same address, which cannot be pinned twice
            self._cudart.cudaHostUnregister(self._memory.data_ptr())

    def write(self, path: Path, tensors: Sequence[RawTensor]) -> list[str]:
        """As `write_host_file`, of tensors on the GPU. Half of the memory is filled while the other is written."""
        if self._stream is not None:  # what was made contiguous was so on the default stream
            self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        self._writer.begin(path, tensors)
        number = 0
        for number, parts in enumerate(_pieces(tensors), 1):
            if number > 2:
                self._writer.answer()
            begin = (number % 2) * _PIECE_BYTES
            self._writer.add(begin, self._fill(begin, parts))
        for _ in range(min(number, 2)):
            self._writer.answer()
        return digests_of(tensors, self._writer.answer())

    def _fill(self, begin: int, parts: Sequence[torch.Tensor]) -> int:
        place = begin
        with torch.cuda.stream(self._stream):
            for part in parts:
                self._memory[place : place + part.numel()].copy_(part, non_blocking=True)
                place += part.numel()
        if self._stream is not None:
            self._stream.synchronize()
        return place - begin


def _pieces(tensors: Sequence[RawTensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the bytes of tensors in pieces of `_PIECE_BYTES`, each of a few parts of device memory."""
    parts: list[torch.Tensor] = []
    room = _PIECE_BYTES
    for run in _runs(tensors):
        while run.numel():
            parts.append(run[:room])
            run = run[room:]
            room -= parts[-1].numel()
            if not room:
                yield parts
                parts, room = [], _PIECE_BYTES
    if parts:
        yield parts


def _runs(tensors: Sequence[RawTensor]) -> Iterator[torch.Tensor]:
    """Yield the bytes of tensors; neighbours in memory, as in a packed chunk, are one."""
    for first, last in _neighbours(tensors):
        flat = first.owner.reshape(-1).view(torch.uint8)
        yield flat.as_strided((last.address + last.num_bytes - first.address,), (1,))


def _neighbours(tensors: Sequence[RawTensor]) -> Iterator[tuple[RawTensor, RawTensor]]:
    run: list[RawTensor] = []
    for tensor in filter(attrgetter("num_bytes"), tensors):
        if run and (run[-1].address + run[-1].num_bytes, _storage(run[-1])) == (tensor.address, _storage(tensor)):
            run = [run[0], tensor]
        else:
            if run:
                yield run[0], run[-1]
            run = [tensor]
    if run:
        yield run[0], run[-1]


def _storage(tensor: RawTensor) -> int:
    return int(tensor.owner.untyped_storage().data_ptr())


def write_file(path: Path, tensors: Sequence[RawTensor]) -> list[str]:
    """As `write_host_file`, of tensors some of which may be on a GPU."""
    device = next((tensor.owner.device for tensor in tensors if tensor.owner.is_cuda), None)
    if device is None:
        return write_host_file(path, tensors)
    with GpuFiles.taken(device) as way:
        return way.write(path, tensors)
