"""Reads a checkpoint folder's tensors to a GPU, as fast as its host copies memory.

vLLM's own reader copies tensor after tensor from a mapped file on one core. A replica that returns, and a fleet that
loads a version of the relay, wait for it. Here threads read parts of the files into pinned memory while earlier parts
are copied to the GPU. Without a GPU they read each part into its tensor, while earlier tensors are used.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO

import torch

from engines.batches import batches
from engines.checkpoint.folder import Span, read_spans
from engines.store.files import read_at
from engines.transfer.packing import NamedTensor

_THREADS = max(8, min(12, len(os.sched_getaffinity(0)) * 3 // 4))
"""Beside an H200 twelve threads reach 40 GB/s, more of them only wait for their turn in Python. Pinned memory: 55."""

_PART_BYTES = 16 << 20
"""Read by one thread at a time. Each part costs 0.2 ms of Python, for which threads wait for each other: half of the
time with parts of 8 MB. Larger parts do not stay in the cache of the host, and copies cost up to a third more."""
_BATCH_BYTES = 256 << 20
"""The least size of a batch of consecutive tensors, which are on the device together."""
_AHEAD = 2
"""Batches that are read at a time."""


class _Batch:
    """Consecutive tensors of one file on their way to the device. The file is opened once for all parts."""

    def __init__(self, file: Path, spans: Sequence[Span], device: torch.device) -> None:
        self._spans = spans
        self._begin = spans[0].begin
        self._there = torch.empty(spans[-1].end - self._begin, dtype=torch.uint8, device=device)
        self._file = file.open("rb")
        self._parts: list[Future[None]] = []

    def begin(self, readers: ThreadPoolExecutor) -> None:
        """Have threads read its parts."""
        for offset in range(0, self._there.numel(), _PART_BYTES):
            place = self._there[offset : offset + _PART_BYTES]
            self._parts.append(readers.submit(_fill, place, self._file, self._begin + offset))

    def tensors(self) -> Iterator[NamedTensor]:
        """Yield its tensors, once all parts are there."""
        while self._parts:  # a part that failed would keep the memory of all
            self._parts.pop().result()
        for span in self._spans:
            content = self._there[span.begin - self._begin : span.end - self._begin]
            dtype = getattr(torch, span.dtype)
            # Files packed tightly may begin a tensor at any byte; a tensor of wider elements may not.
            is_aligned = content.storage_offset() % dtype.itemsize == 0
            yield span.name, (content if is_aligned else content.clone()).view(dtype).view(span.shape)

    def close(self) -> None:
        """Close the file. No thread may read from it."""
        self._file.close()


_of_thread = threading.local()
"""A reading thread's pinned memory for one part, and the event that says when the part before has left it."""


def _prepare_thread(stream: torch.cuda.Stream) -> None:
    """Have a thread of the read work on the stream."""
    # Nothing is restored: the thread's own stream is on GPU 0, where a worker of another GPU takes no memory.
    torch.cuda.set_stream(stream)
    _of_thread.pinned, _of_thread.left = _pinned(), torch.cuda.Event()


def _fill(place: torch.Tensor, file: BinaryIO, offset: int) -> None:
    """Read the bytes of `place` from `offset` of the file on. To a GPU queue their copy, from pinned memory."""
    if place.device.type == "cpu":
        read_at(file, memoryview(place.numpy()), offset)
        return
    _of_thread.left.synchronize()
    part = _of_thread.pinned[: place.numel()]
    read_at(file, memoryview(part.numpy()), offset)
    with torch.inference_mode():  # the caller of the read may be in it, and this is another thread
        place.copy_(part, non_blocking=True)
    _of_thread.left.record()


def _pinned() -> torch.Tensor:
    return torch.empty(_PART_BYTES, dtype=torch.uint8, pin_memory=True)


def pin_memory() -> None:
    """Allocate the pinned memory of reads, which torch keeps: the first read is then as fast as the next."""
    _ = [_pinned() for _ in range(_THREADS)]


def read_tensors(folder: Path, device: torch.device) -> Iterator[NamedTensor]:
    """Return names and tensors in the order of the files, for work on the device's current stream.

    Raise as `read_spans` does, and `ValueError` for a tensor that torch cannot hold. Raise `OSError` where the folder
    holds no tensors, and later where a file cannot be read to its end.
    """
    found = [
        (folder / file, batch)
        for file, spans in read_spans(folder).items()
        for batch in batches(_checked_spans(folder / file, spans), attrgetter("num_bytes"), _BATCH_BYTES)
    ]
    if not found:
        raise FileNotFoundError(f"{folder} holds no safetensors")
    return _read(found, device)


def _read(found: Sequence[tuple[Path, Sequence[Span]]], device: torch.device) -> Iterator[NamedTensor]:
    prepare = None if device.type == "cpu" else partial(_prepare_thread, torch.cuda.current_stream(device))
    readers = ThreadPoolExecutor(_THREADS, "snapshot", prepare)
    waiting, reading = iter(found), deque[_Batch]()

    def read_on(count: int) -> None:
        for file, spans in islice(waiting, count):
            reading.append(_Batch(file, spans, device))
            reading[-1].begin(readers)

    try:
        read_on(_AHEAD)
        while reading:
            yield from reading[0].tensors()
            reading.popleft().close()
            read_on(1)
    finally:
        readers.shutdown(cancel_futures=True)
        while reading:
            reading.pop().close()


def _checked_spans(file: Path, spans: Sequence[Span]) -> list[Span]:
    """Return the tensors of a file in its order. Raise `ValueError` where torch has no such dtype, or its tensor of
    this shape has another size."""
    for span in spans:
        dtype = getattr(torch, span.dtype, None)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize * prod(span.shape) != span.num_bytes:
            raise ValueError(
                f"{file}: tensor {span.name!r} of {span.num_bytes} bytes is no {span.dtype} of shape "
                f"{list(span.shape)} to torch"
            )
    return sorted(spans, key=attrgetter("begin", "end"))
