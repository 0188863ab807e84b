"""Torch tensors as bytes: in host memory for the store, and as a digest where they lie."""

from functools import cache

import torch

from engines.weight_store import RawTensor, digest_of

_BLOCK = 1 << 24  # words of a tensor that are multiplied at a time, in 128 MiB; as much holds their factors
_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))


def raw_tensor(name: str, tensor: torch.Tensor, digest: str = "") -> RawTensor:
    """The tensor's bytes where it is contiguous on the host, else those of a copy there."""
    there = tensor.detach().cpu().contiguous()
    dtype = str(there.dtype).removeprefix("torch.")
    return RawTensor(name, dtype, list(there.shape), there.data_ptr(), there.nbytes, there, digest)


def digest_on_host(tensor: torch.Tensor) -> str:
    """Digest of a tensor on the host, as the store has it."""
    return digest_of(raw_tensor("", tensor).bytes)


def sum_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Digest of a tensor as a 64-bit number on its own device, without waiting for it.

    Each 4-byte word is multiplied with an odd number of its place, modulo 2**64: a word that changes changes the sum,
    and so do words that change places, but for one case in 2**32. A GPU moves seven times the tensor's bytes for it.
    """
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = content.numel() % 4
    words = _words(content[: content.numel() - rest])
    total = torch.full((), content.numel(), dtype=torch.int64, device=tensor.device)
    for block in words.split(_BLOCK):
        total = total * _MIX[0] + (block * _factors(tensor.device)[: block.numel()]).sum()
    if rest:
        tail = content[content.numel() - rest :].to(torch.int64)
        total = total * _MIX[1] + (tail * _factors(tensor.device)[:rest]).sum()
    return total


def _words(content: torch.Tensor) -> torch.Tensor:
    if not content.numel():
        return content.to(torch.int32)
    # Tensors packed behind each other may begin at any byte; words may not.
    is_aligned = content.data_ptr() % 4 == 0 and content.storage_offset() % 4 == 0
    return (content if is_aligned else content.clone()).view(torch.int32)


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """An odd number for each place of a block, the same everywhere."""
    number = torch.arange(1, _BLOCK + 1, dtype=torch.int64, device=device) * _MIX[0]
    number ^= number >> 29
    number *= _MIX[1]
    return number | 1
