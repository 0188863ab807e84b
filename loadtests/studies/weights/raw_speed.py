"""Raw speed of the transports' media: a broadcast, file writes and reads, copies to a GPU."""

import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

from engines.process.port import free_port

_CHUNK_BYTES = 1 << 30
_REPEATS = 3
_TIMEOUT_S = 60.0
_BLOCK_BYTES = 64 << 20


def broadcast_speed(backend: str, devices: tuple[str, str], num_bytes: int) -> float:
    """Return GB/s of torch's broadcast of `num_bytes` from the first device to the second, the median of three.

    `backend` is "gloo" or "nccl"; devices are torch's names. Uses two processes, which end with the call. Raises
    `TimeoutError` if they do not end.
    """
    context = multiprocessing.get_context("spawn")
    port, ours = free_port(), []
    processes = []
    for rank, device in enumerate(devices):
        pipe, theirs = context.Pipe()
        process = context.Process(target=_take_part, args=(theirs, backend, device, rank, port, num_bytes), daemon=True)
        process.start()
        theirs.close()
        ours.append(pipe)
        processes.append(process)
    try:
        if not ours[0].poll(_TIMEOUT_S):
            raise TimeoutError(f"a broadcast over {backend} did not end within {_TIMEOUT_S:g} s")
        seconds: list[float] = ours[0].recv()
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return num_bytes / statistics.median(seconds) / 1e9


def file_speeds(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Return GB/s of writing a file of `num_bytes` into `folder` and of reading it, each with one thread."""
    path, block = folder / f"speed-{os.getpid()}", os.urandom(min(num_bytes, _BLOCK_BYTES))
    try:
        began = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            written = 0
            while written < num_bytes:
                written += file.write(block[: num_bytes - written])
        middle = time.perf_counter()
        buffer = bytearray(_BLOCK_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        ended = time.perf_counter()
    finally:
        path.unlink(missing_ok=True)
    return num_bytes / (middle - began) / 1e9, num_bytes / (ended - middle) / 1e9


def copy_speeds(device: str, num_bytes: int) -> tuple[float, float]:
    """Return GB/s of copies to a GPU: from pinned memory, and from a file in memory, tensor by tensor like a
    checkpoint.
    Its process ends with the call."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_copy, args=(theirs, device, num_bytes), daemon=True)
    process.start()
    theirs.close()
    try:
        if not pipe.poll(_TIMEOUT_S):
            raise TimeoutError(f"a copy to {device} did not end within {_TIMEOUT_S:g} s")
        pinned_s, mapped_s = pipe.recv()
    finally:
        process.terminate()
        process.join()
    return num_bytes / pinned_s / 1e9, num_bytes / mapped_s / 1e9


def _copy(pipe: Connection, device: str, num_bytes: int) -> None:
    import torch

    there = torch.empty(min(num_bytes, _BLOCK_BYTES), dtype=torch.uint8, device=device)
    pinned = torch.empty(len(there), dtype=torch.uint8, pin_memory=True)
    path = Path("/dev/shm") / f"copied-{os.getpid()}"
    path.write_bytes(os.urandom(len(there)))
    mapped = torch.from_file(str(path), size=len(there), dtype=torch.uint8)

    def seconds(source: torch.Tensor) -> float:
        torch.cuda.synchronize(device)
        began, left = time.perf_counter(), num_bytes
        while left > 0:
            there[:left].copy_(source[:left], non_blocking=True)
            left -= len(there)
        torch.cuda.synchronize(device)
        return time.perf_counter() - began

    try:
        pipe.send([min(seconds(source) for _ in range(_REPEATS)) for source in (pinned, mapped)])
    finally:
        path.unlink()


def _take_part(pipe: Connection, backend: str, device: str, rank: int, port: int, num_bytes: int) -> None:
    # As in engines and their trainers; must be set before torch uses CUDA.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    import torch
    import torch.distributed

    ours = torch.device(device)
    if ours.type == "cuda":
        torch.cuda.set_device(ours)
    torch.distributed.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
        device_id=ours if ours.type == "cuda" else None,  # a rank is not its GPU's number here
    )  # fmt: skip
    chunk = torch.zeros(min(num_bytes, _CHUNK_BYTES), dtype=torch.uint8, device=device)

    def once() -> float:
        torch.distributed.barrier()
        began, left = time.perf_counter(), num_bytes
        while left > 0:
            torch.distributed.broadcast(chunk[: min(left, len(chunk))], src=0)
            left -= len(chunk)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    seconds = [once() for _ in range(_REPEATS)]
    torch.distributed.barrier()
    pipe.send(seconds)
    torch.distributed.destroy_process_group()
