"""Torch tensors as bytes in host memory, the store's form. `device_sum.py` digests tensors on a GPU."""

import torch

from engines.store.draft import RawTensor
from engines.store.manifest import digest_of


def raw_tensor(name: str, tensor: torch.Tensor, digest: str = "") -> RawTensor:
    """Return the bytes of a tensor in host memory, without a copy if it is contiguous there."""
    return where_it_is(name, on_host(tensor.detach()).resolve_neg(), digest)  # its memory may hold the values negated


def where_it_is(name: str, tensor: torch.Tensor, digest: str = "") -> RawTensor:
    """Return the bytes of a tensor in the memory of its device, without a copy if it is contiguous."""
    there = tensor if tensor.is_contiguous() else tensor.contiguous()
    dtype = str(there.dtype).removeprefix("torch.")
    return RawTensor(name, dtype, list(there.shape), there.data_ptr(), there.nbytes, there, digest)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in host memory. A GPU tensor is copied to pinned memory, which is many times faster and runs
    beside kernels; torch reuses the memory for the next tensor."""
    if not tensor.is_cuda:
        return tensor.cpu()
    there = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    there.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return there


def digest_on_host(tensor: torch.Tensor) -> str:
    """Return the store's digest of a tensor on the host."""
    return digest_of(raw_tensor("", tensor).bytes)
