"""Torch tensors as bytes in host memory, as the store has them. Those on a GPU are digested by `device_sum.py`."""

import torch

from engines.weight_store import RawTensor, digest_of


def raw_tensor(name: str, tensor: torch.Tensor, digest: str = "") -> RawTensor:
    """The tensor's bytes where it is contiguous on the host, else those of a copy there."""
    there = tensor.detach().cpu().contiguous()
    dtype = str(there.dtype).removeprefix("torch.")
    return RawTensor(name, dtype, list(there.shape), there.data_ptr(), there.nbytes, there, digest)


def digest_on_host(tensor: torch.Tensor) -> str:
    """Digest of a tensor on the host, as the store has it."""
    return digest_of(raw_tensor("", tensor).bytes)
