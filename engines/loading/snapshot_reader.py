"""Reads a checkpoint folder's tensors to a GPU, as fast as its host copies memory.

vLLM's own reader copies tensor after tensor from a mapped file on one core. A replica that returns, and a fleet that
loads a version of the relay, wait for it. Here threads read parts of the files into pinned memory while earlier parts
are copied to the GPU. Without a GPU they read each part into its tensor, while earlier tensors are used.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from engines.batches import batches
from engines.checkpoint import Span, read_spans
from engines.store.files import read_at

_PART_BYTES = 32 << 20
_BATCH_BYTES = 256 << 20
"""The least size of a batch of consecutive tensors, which are on the device together."""
_THREADS = max(8, min(24, len(os.sched_getaffinity(0)) // 2))
"""One thread copies 3 GB/s. Beside an H100 eight reach 23 GB/s, sixteen 36, 24 and 48 reach 41; pinned memory 55."""
_BUFFERS = _THREADS + 8
_HOST_PART_BYTES = 4 << 20
_HOST_BATCH_BYTES = 16 << 20
"""Batch without a GPU: small enough that freed memory is used again, since fresh pages cost as much as a copy."""
_HOST_BATCHES_AHEAD = 8


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
    """Pinned host memory for one part at a time."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(_PART_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._left: Any = None

    def fill(self, file: Path, offset: int, length: int) -> "_Buffer":
        """Read a part, once the copy of the part before has ended."""
        if self._left is not None:
            self._left.synchronize()
        _fill(self.memory[:length], file, offset)
        return self

    def leave_for(self, place: torch.Tensor) -> None:
        place.copy_(self.memory[: place.numel()], non_blocking=True)
        if place.is_cuda:
            self._left = torch.cuda.Event()
            self._left.record(torch.cuda.current_stream(place.device))


def pin_buffers(device: torch.device) -> None:
    """Allocate the pinned memory of reads, which torch keeps: the first read is then as fast as the next."""
    _ = [_Buffer(device) for _ in range(_BUFFERS)]


def read_tensors(folder: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Return names and tensors in the order of the files, for work on the device's current stream.

    Raise `OSError` where the folder holds no tensors, and later where a file cannot be read to its end.
    """
    is_host = device.type == "cpu"
    batch_bytes = _HOST_BATCH_BYTES if is_host else _BATCH_BYTES
    files = read_spans(folder).items()
    found = [batch for file, spans in files for batch in _batches(folder / file, spans, batch_bytes)]
    if not found:
        raise FileNotFoundError(f"{folder} holds no safetensors")
    return _read_in_place(found) if is_host else _read(found, device)


def _read_in_place(batches: Sequence[_Batch]) -> Iterator[tuple[str, torch.Tensor]]:
    readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="snapshot")
    waiting, reading = iter(batches), deque[tuple[_Batch, torch.Tensor, list[Future[None]]]]()

    def read_on(count: int) -> None:
        for batch in islice(waiting, count):
            there = torch.empty(batch.num_bytes, dtype=torch.uint8)
            parts = [
                readers.submit(_fill, there[offset : offset + length], batch.file, batch.begin + offset)
                for offset, length in batch.parts(_HOST_PART_BYTES)
            ]
            reading.append((batch, there, parts))

    try:
        read_on(_HOST_BATCHES_AHEAD)
        while reading:
            batch, there, parts = reading.popleft()
            for part in parts:
                part.result()
            yield from _tensors(batch, there)
            read_on(1)
    finally:
        readers.shutdown(cancel_futures=True)


def _read(batches: Sequence[_Batch], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    buffers = deque(_Buffer(device) for _ in range(_BUFFERS))
    readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="snapshot")
    jobs = ((batch, offset, length) for batch in batches for offset, length in batch.parts(_PART_BYTES))
    try:
        # As many reads run as there are buffers, and they are awaited in the order of their start.
        reading: deque[Future[_Buffer]] = deque()

        def read_on() -> None:
            for batch, offset, length in islice(jobs, len(buffers)):
                reading.append(readers.submit(buffers.popleft().fill, batch.file, batch.begin + offset, length))

        read_on()
        for batch in batches:
            there = torch.empty(batch.num_bytes, dtype=torch.uint8, device=device)
            for offset, length in batch.parts(_PART_BYTES):
                buffer = reading.popleft().result()
                buffer.leave_for(there[offset : offset + length])
                buffers.append(buffer)
                read_on()
            yield from _tensors(batch, there)
    finally:
        readers.shutdown(cancel_futures=True)


def _fill(place: torch.Tensor, file: Path, offset: int) -> None:
    """Read the bytes of `place`, which is on the host, from `offset` of the file on."""
    with file.open("rb", buffering=0) as source:
        read_at(source, memoryview(place.numpy()), offset)


def _batches(file: Path, spans: Sequence[Span], batch_bytes: int) -> Iterator[_Batch]:
    in_order = sorted(spans, key=lambda span: span.begin)
    return (_Batch(file, batch) for batch in batches(in_order, attrgetter("num_bytes"), batch_bytes))


def _tensors(batch: _Batch, there: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for span in batch.spans:
        content, dtype = there[span.begin - batch.begin : span.end - batch.begin], getattr(torch, span.dtype)
        # Files packed tightly may begin a tensor at any byte; a tensor of wider elements may not.
        is_aligned = content.storage_offset() % dtype.itemsize == 0
        yield span.name, (content if is_aligned else content.clone()).view(dtype).view(span.shape)
