"""Reads a checkpoint folder's tensors to a GPU, as fast as its host copies memory.

vLLM's own reader copies tensor after tensor from a mapped file on one core. A replica that returns, and a fleet that
loads a version of the relay, wait for it. Here threads read parts of the files into pinned memory while earlier parts
are copied to the GPU. Without a GPU they read each part into its tensor, while earlier tensors are used.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from math import prod
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import torch

from engines.batches import batches
from engines.checkpoint import PLACE, FileStates, Span, file_states, open_regular, read_spans
from engines.store.files import read_at
from engines.transfer.packing import NamedTensor

_Fill = Callable[[torch.Tensor, BinaryIO, int], None]

_THREADS = max(8, min(12, len(os.sched_getaffinity(0)) * 3 // 4))
"""Beside an H200 twelve threads reach 40 GB/s, more of them only wait for their turn in Python. Pinned memory: 55."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of reads.

    part_bytes: read by one thread at a time.
    batch_bytes: the least size of a batch of consecutive tensors, which are on the device together.
    num_ahead: batches that are read at a time.
    """

    part_bytes: int
    batch_bytes: int
    num_ahead: int


_TO_GPU = _Sizes(part_bytes=16 << 20, batch_bytes=256 << 20, num_ahead=2)
"""Each part costs 0.2 ms of Python, for which threads wait for each other: half of the time with parts of 8 MB. Larger
parts do not stay in the cache of the host, and copies cost up to a third more."""
_TO_HOST = _Sizes(part_bytes=4 << 20, batch_bytes=16 << 20, num_ahead=8)
"""Batches so small that freed memory is used again, since fresh pages cost as much as a copy."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Consecutive tensors of one file."""

    file: Path
    spans: Sequence[Span]

    @property
    def begin(self) -> int:
        return self.spans[0].begin

    @property
    def num_bytes(self) -> int:
        return self.spans[-1].end - self.begin

    def parts(self, part_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the offset in the batch and the length of each part."""
        for offset in range(0, self.num_bytes, part_bytes):
            yield offset, min(part_bytes, self.num_bytes - offset)


class _Buffer:
    """Pinned memory for one part at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(_TO_GPU.part_bytes, dtype=torch.uint8, pin_memory=True)
        self._left = torch.cuda.Event()

    def copy(self, place: torch.Tensor, file: BinaryIO, offset: int) -> None:
        """Read the bytes of `place` from `offset` of the file on, once the part before has left. Queue their copy on
        the current stream."""
        self._left.synchronize()
        part = self._memory[: place.numel()]
        _fill(part, file, offset)
        with torch.inference_mode():  # the caller of the read may be in it, and this is another thread
            place.copy_(part, non_blocking=True)
        self._left.record()


class _Buffers:
    """Pinned memory for as many parts as there are threads. Copies are queued on the stream that is current here."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(_THREADS):
            self._free.put(_Buffer())

    def enter_stream(self) -> None:
        """Have a thread of the read work on the stream."""
        # Nothing is restored: the thread's own stream is on GPU 0, where a worker of another GPU takes no memory.
        torch.cuda.set_stream(self._stream)

    def fill(self, place: torch.Tensor, file: BinaryIO, offset: int) -> None:
        """Read the bytes of `place`, which is on the GPU, from `offset` of the file on, in a thread of the read."""
        buffer = self._free.get()
        try:
            buffer.copy(place, file, offset)
        finally:
            self._free.put(buffer)


class _Reading:
    """A batch on its way to the device. Its file is opened once for all parts, and closed with it."""

    def __init__(self, batch: _Batch, device: torch.device) -> None:
        self._batch = batch
        self._there = torch.empty(batch.num_bytes, dtype=torch.uint8, device=device)
        self._file = open_regular(batch.file)
        self._parts: list[Future[None]] = []

    def begin(self, readers: ThreadPoolExecutor, fill: _Fill, part_bytes: int) -> None:
        """Have threads read its parts."""
        for offset, length in self._batch.parts(part_bytes):
            place = self._there[offset : offset + length]
            self._parts.append(readers.submit(fill, place, self._file, self._batch.begin + offset))

    def tensors(self) -> Iterator[NamedTensor]:
        """Yield its tensors, once all parts are there."""
        while self._parts:  # a part that failed would keep the memory of all
            self._parts.pop().result()
        for span in self._batch.spans:
            content = self._there[span.begin - self._batch.begin : span.end - self._batch.begin]
            dtype = getattr(torch, span.dtype)
            # Files packed tightly may begin a tensor at any byte; a tensor of wider elements may not.
            is_aligned = content.storage_offset() % dtype.itemsize == 0
            yield span.name, (content if is_aligned else content.clone()).view(dtype).view(span.shape)

    def close(self) -> None:
        """Close the file. No thread may read from it."""
        self._file.close()


def pin_memory() -> None:
    """Allocate the pinned memory of reads, which torch keeps: the first read is then as fast as the next."""
    _ = [_Buffer() for _ in range(_THREADS)]


def read_tensors(folder: Path, device: torch.device) -> Iterator[NamedTensor]:
    """Return names and tensors in the order of the files, for work on the device's current stream.

    Raise as `read_spans` does, also later, and `ValueError` for a tensor that torch cannot hold. Raise `OSError` where
    the folder holds no tensors, and later where a file cannot be read to its end or has become another.
    """
    sizes = _TO_HOST if device.type == "cpu" else _TO_GPU
    states = file_states(folder)
    files = read_spans(folder).items()
    found = [batch for file, spans in files for batch in _batches(folder / file, spans, sizes.batch_bytes)]
    if not found:
        raise FileNotFoundError(f"{folder} holds no safetensors")
    return _checked(_read(found, device, sizes), folder, states)


def _checked(tensors: Iterator[NamedTensor], folder: Path, states: FileStates) -> Iterator[NamedTensor]:
    """Yield the tensors. Raise `OSError` at the end where the files are not those of before."""
    yield from tensors
    if file_states(folder) != states:
        raise OSError(f"{folder}: its files were replaced while they were read")


def _read(batches: Sequence[_Batch], device: torch.device, sizes: _Sizes) -> Iterator[NamedTensor]:
    buffers = None if device.type == "cpu" else _Buffers(device)
    fill, initializer = (_fill, None) if buffers is None else (buffers.fill, buffers.enter_stream)
    readers = ThreadPoolExecutor(_THREADS, "snapshot", initializer)
    waiting, reading = iter(batches), deque[_Reading]()

    def read_on(count: int) -> None:
        for batch in islice(waiting, count):
            reading.append(_Reading(batch, device))
            reading[-1].begin(readers, fill, sizes.part_bytes)

    try:
        read_on(sizes.num_ahead)
        while reading:
            yield from reading[0].tensors()
            reading.popleft().close()
            read_on(1)
    finally:
        readers.shutdown(cancel_futures=True)
        while reading:
            reading.pop().close()


def _fill(place: torch.Tensor, file: BinaryIO, offset: int) -> None:
    """Read the bytes of `place`, which is on the host, from `offset` of the file on."""
    read_at(file, memoryview(place.numpy()), offset)


def _batches(file: Path, spans: Sequence[Span], batch_bytes: int) -> Iterator[_Batch]:
    for span in spans:
        _check_layout(file, span)
    in_order = sorted(spans, key=PLACE)
    return (_Batch(file, batch) for batch in batches(in_order, attrgetter("num_bytes"), batch_bytes))


def _check_layout(file: Path, span: Span) -> None:
    """Raise `ValueError` where torch has no such dtype, or its tensor of this shape has another size."""
    dtype = getattr(torch, span.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize * prod(span.shape) != span.num_bytes:
        raise ValueError(
            f"{file}: tensor {span.name!r} of {span.num_bytes} bytes is no {span.dtype} of shape {list(span.shape)} "
            "to torch"
        )
