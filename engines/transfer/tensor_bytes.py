"""Torch tensors as bytes in host memory, as the store has them. Those on a GPU are digested by `device_sum.py`."""

import torch

from engines.store.draft import RawTensor
from engines.store.manifest import digest_of


def raw_tensor(name: str, tensor: torch.Tensor, digest: str = "") -> RawTensor:
    """The tensor's bytes where it is contiguous on the host, else those of a copy there."""
    there = on_host(tensor.detach()).contiguous()
    dtype = str(there.dtype).removeprefix("torch.")
    return RawTensor(name, dtype, list(there.shape), there.data_ptr(), there.nbytes, there, digest)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory. What comes from a GPU lands in pinned memory, which the GPU fills many times as fast
    as any other and beside its kernels; torch keeps that for the next tensor."""
    if not tensor.is_cuda:
        return tensor.cpu()
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    there.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return there


def digest_on_host(tensor: torch.Tensor) -> str:
    """Digest of a tensor on the host, as the store has it."""
    return digest_of(raw_tensor("", tensor).bytes)
