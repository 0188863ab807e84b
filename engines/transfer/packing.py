"""Chunks: the bytes of consecutive tensors, as vLLM's packed transfer has them on both ends.

vLLM takes three to four operations for each tensor, and ours one or two for each chunk, in half the CPU time. Of 4,719
tensors vLLM's unpacking is 25 ms of an update on a GPU host, in which the next chunk is not asked for. A tensor that
begins at a place which is no multiple of its element is an error in vLLM.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import groupby
from operator import attrgetter

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from engines.batches import batches

Announced = tuple[str, torch.dtype, list[int]]
"""Name, dtype and full shape of an announced tensor."""
NamedTensor = tuple[str, torch.Tensor]

CHUNK_BYTES = 1 << 30
"""A chunk ends once it holds more than this, on both ends and in vLLM's packed NCCL transfer."""


def packed(tensors: Iterable[NamedTensor], chunk_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of each chunk, on the device of its tensors. Equals vLLM's `pack_tensors`, whose import takes
    seconds."""
    return map(_joined, batches((tensor for _, tensor in tensors), attrgetter("nbytes"), chunk_bytes + 1))


def chunks(announced: Iterable[Announced], chunk_bytes: int) -> Iterator[list[Announced]]:
    """Yield the chunks of `packed`: a chunk ends with the tensor that exceeds `chunk_bytes`."""
    return batches(announced, num_bytes, chunk_bytes + 1)


def num_bytes(tensor: Announced) -> int:
    _, dtype, shape = tensor
    return math.prod(shape) * int(dtype.itemsize)


@cache
def kept_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Return CUDA streams for chunks, always the same: torch keeps freed memory for the stream that used it, and would
    allocate more for each version."""
    return [torch.cuda.Stream(device) for _ in range(count)]


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
) -> list[NamedTensor]:
    """As vLLM's `unpack_tensor`: `packed_tensor` holds bytes, shape (sum of `tensor_sizes`,)."""
    tensors: list[torch.Tensor] = []
    begin = 0
    for dtype, run in groupby(dtypes):
        first, last = len(tensors), len(tensors) + sum(1 for _ in run)
        size = sum(tensor_sizes[first:last])
        content = packed_tensor[begin : begin + size]
        elements = (content if begin % dtype.itemsize == 0 else content.clone()).view(dtype)
        tensors += _unflatten_dense_tensors(elements, [_form(tuple(shape)) for shape in shapes[first:last]])
        begin += size
    return list(zip(names, tensors, strict=True))


def unpacked_as(chunk: Sequence[Announced], content: torch.Tensor) -> list[NamedTensor]:
    """Return the announced tensors of a chunk over its bytes."""
    names, dtypes, shapes = zip(*chunk, strict=True)
    return unpacked(content, names, shapes, dtypes, list(map(num_bytes, chunk)))


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of all parts; of a single part without a copy."""
    dtype = parts[0].dtype
    # torch joins tensors of one dtype, and not all dtypes of a byte.
    as_they_are = dtype.itemsize > 1 and all(one.dtype is dtype for one in parts)
    with torch.no_grad():  # trainers' tensors may have gradients
        if not as_they_are:
            parts = [one.contiguous().view(-1).view(torch.uint8) for one in parts]
        joined: torch.Tensor = _flatten_dense_tensors(parts)
        return joined.view(torch.uint8)


@lru_cache(4096)
def _form(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this shape without content."""
    return torch.empty(shape, device="meta")
