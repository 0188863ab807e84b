"""Tensors over the bytes of a packed chunk, by one operation each.

vLLM takes four for each tensor. Of 4,719 tensors that is 25 ms of an update, in which the next chunk is not asked for;
and a tensor that begins at a place which is no multiple of its element is an error there.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import torch


def unpack_quickly() -> None:
    """Have this process's vLLM unpack the chunks that it receives by `unpacked`."""
    from vllm.distributed.weight_transfer import packed_tensor

    packed_tensor.unpack_tensor = unpacked


def unpacked(
    packed_tensor: torch.Tensor,
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    tensor_sizes: Sequence[int],
) -> list[tuple[str, torch.Tensor]]:
    """As vLLM's `unpack_tensor`: `packed_tensor` holds bytes, shape (sum of `tensor_sizes`,)."""
    return list(zip(names, _views(packed_tensor, shapes, dtypes, tensor_sizes), strict=True))


def _views(
    packed: torch.Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], sizes: Sequence[int]
) -> Iterator[torch.Tensor]:
    whole = {dtype: _as(dtype, packed) for dtype in set(dtypes)}
    for shape, dtype, size, begin in zip(shapes, dtypes, sizes, accumulate(sizes, initial=0), strict=False):
        place, rest = divmod(begin, dtype.itemsize)
        if rest:
            yield packed[begin : begin + size].clone().view(dtype).view(tuple(shape))
        else:
            elements = whole[dtype]
            yield elements.as_strided(shape, _strides(tuple(shape)), elements.storage_offset() + place)


def _as(dtype: torch.dtype, packed: torch.Tensor) -> torch.Tensor:
    """All elements of a chunk that begins at a multiple of theirs."""
    return packed[: len(packed) // dtype.itemsize * dtype.itemsize].view(dtype)


@lru_cache(4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides: tuple[int, ...] = torch.empty(shape, device="meta").stride()
    return strides
