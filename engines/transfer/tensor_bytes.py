"""Torch tensors as bytes, the store's form, and the digests of these."""

from collections.abc import Iterable, Iterator

import torch

from engines.store.draft import RawTensor
from engines.store.manifest import digest_of
from engines.transfer.packing import NamedTensor

_WORD = 8
"""Bytes of a word of `sum_on_device`."""


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


def runs(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the bytes of contiguous tensors. Neighbours in memory, as in a packed chunk, are one, under the name of the
    first."""
    run: list[NamedTensor] = []
    for name, tensor in tensors:
        if not tensor.nbytes:
            continue
        if run and not _are_neighbours(run[-1][1], tensor):
            yield _joined(run)
            run = []
        run.append((name, tensor))
    if run:
        yield _joined(run)


def sum_on_device(content: torch.Tensor) -> torch.Tensor:
    """Return the exclusive or of the words of these bytes (not none), made where they lie, without a wait for it."""
    if content.storage_offset() % _WORD:
        content = content.clone()
    end = len(content) - len(content) % _WORD
    parts = content[:end].view(torch.int64), content[end:]
    words, *rest = [torch.hash_tensor(part).view(torch.int64) for part in parts if len(part)]
    return words ^ rest[0] if rest else words


def _are_neighbours(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_next = one.data_ptr() + one.nbytes == other.data_ptr()
    return bool(is_next and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


def _joined(run: list[NamedTensor]) -> NamedTensor:
    (name, first), (_, last) = run[0], run[-1]
    content = first.detach().reshape(-1).view(torch.uint8)
    return name, content.as_strided((last.data_ptr() + last.nbytes - first.data_ptr(),), (1,))
