"""Writes tensors of a GPU to files, beside an engine whose next step is prepared in the same process."""

import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from engines.store.draft import RawTensor, write_file, write_host_file
from engines.transfer.tensor_bytes import runs

_PIECE_BYTES = 128 << 20
"""As much leaves a GPU at a time: few calls, as each waits for the engine's Python, and holds it up (16 MB: by 6 %)."""

turns = threading.Semaphore(1)
"""One file leaves a GPU at a time: beside two threads an engine's steps took 14 % longer, beside one no longer."""
_pinned: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
"""Memory by which pieces leave, kept for the next file: to pin memory stops an engine for up to 1.4 s."""


def pin_memory() -> None:
    """Pin as much memory as a file takes. Raise `RuntimeError` where none can be pinned."""
    if _pinned.empty():
        _pinned.put(torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True))


def write_any_file(path: Path, tensors: Sequence[RawTensor]) -> list[str]:
    """As `write_host_file`, of tensors some of which may be on a GPU. A file with one of these has no digests."""
    device = next((tensor.owner.device for tensor in tensors if tensor.owner.is_cuda), None)
    if device is None:
        return write_host_file(path, tensors)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))  # on which tensors were made contiguous
    with turns:
        pin_memory()
        memory = _pinned.get()
        try:
            write_file(path, tensors, pieces(tensors, memory, stream))
        finally:
            _pinned.put(memory)
    return [""] * len(tensors)


def pieces(tensors: Sequence[RawTensor], memory: torch.Tensor, stream: Any) -> Iterator[memoryview]:
    """Yield the bytes of tensors in pieces, each in `memory` until the next; `stream` copies them there."""
    for parts in _parts(tensors, len(memory)):
        place = 0
        with torch.cuda.stream(stream):
            for part in parts:
                memory[place : place + len(part)].copy_(part, non_blocking=True)
                place += len(part)
        if stream is not None:
            stream.synchronize()
        yield memoryview(memory.numpy())[:place]


def _parts(tensors: Sequence[RawTensor], piece_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield the bytes of tensors in pieces, each of a few parts of device memory."""
    parts: list[torch.Tensor] = []
    room = piece_bytes
    for _, run in runs([(tensor.name, tensor.owner) for tensor in tensors]):
        while len(run):
            parts.append(run[:room])
            run = run[room:]
            room -= len(parts[-1])
            if not room:
                yield parts
                parts, room = [], piece_bytes
    if parts:
        yield parts
