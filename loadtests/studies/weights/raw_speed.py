"""The speed of a broadcast by torch alone."""

import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

from engines.process.port import free_port

_CHUNK_BYTES = 1 << 30
_REPEATS = 3
_TIMEOUT_S = 60.0


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
