"""Digests of tensors on a GPU, made where they lie: one kernel reads every byte of all tensors once.

torch has `hash_tensor`, but that is the exclusive or of all words: two words that change places, and two equal words
that become two others, leave it as it was.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

_LANES = 1024
_ROUNDS = 16  # so many words of a lane are added up before the one atomic addition of its program
_LAYOUTS = 256
"""Tables that are kept. A trainer packs alike each time, in a chunk for each GiB."""
_MIX = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_STIR = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))

_Layout = tuple[tuple[int, int, int], ...]
"""Of each tensor: its first byte, counted from the first tensor's, its words and its bytes."""


def sums_on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Digests of tensors of one GPU as int64 numbers there, shape (len(tensors),), without waiting for them.

    Each 4-byte word is multiplied with an odd number of its place, modulo 2**64, and the products are added to the
    number of bytes: a word that changes changes the sum, and so do words that change places, but for one case in 2**32.
    """
    words = [_words(tensor) for tensor in tensors]
    base = words[0].data_ptr()
    layout = tuple(
        (one.data_ptr() - base, one.nbytes // 4, tensor.nbytes) for one, tensor in zip(words, tensors, strict=True)
    )
    return _sums(base, layout, tensors[0].device)


def _sums(base: int, layout: _Layout, device: torch.device) -> torch.Tensor:
    sums = torch.zeros(len(layout), dtype=torch.int64, device=device)
    owners, table = _tables(layout, device)
    if len(owners):
        with torch.cuda.device_of(sums):  # Triton starts kernels on the current GPU
            _add_words[(len(owners),)](base, owners, table, sums, LANES=_LANES, ROUNDS=_ROUNDS)
    return sums


@lru_cache(_LAYOUTS)
def _tables(layout: _Layout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor that each program of the kernel reads, and for each tensor its first program and its layout."""
    starts = torch.tensor(layout, dtype=torch.int64, device="cpu")
    words_each = _LANES * _ROUNDS
    counts = starts[:, 1].add(words_each - 1).div(words_each, rounding_mode="floor")
    owners = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32, device="cpu"), counts)
    first = counts.cumsum(0) - counts
    return owners.to(device), torch.cat([first[:, None], starts], dim=1).contiguous().to(device)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where it can be read word by word, else a copy of it, with zeros behind its last bytes."""
    if tensor.is_contiguous() and tensor.data_ptr() % 4 == 0 and tensor.nbytes % 4 == 0:
        return tensor
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(content, (0, -len(content) % 4)).clone()


@triton.jit
def _plus(left, right):  # type: ignore[no-untyped-def]
    return left + right


# An address that differs from chunk to chunk shall not have the kernel compiled for each kind of them.
@triton.jit(do_not_specialize=["base"])
def _add_words(base, owners, table, sums, LANES: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    owner = tl.load(owners + tl.program_id(0)).to(tl.int64)
    row = table + owner * 4
    turn = tl.program_id(0).to(tl.int64) - tl.load(row)
    words = (base + tl.load(row + 1)).to(tl.pointer_type(tl.int32))
    num_words = tl.load(row + 2)
    total = tl.full([LANES], 0, dtype=tl.int64)
    for step in range(ROUNDS):
        index = (turn * ROUNDS + step) * LANES + tl.arange(0, LANES)
        word = tl.load(words + index, mask=index < num_words, other=0).to(tl.int64)
        factor = (index + 1) * _MIX
        factor = (factor ^ (factor >> 29)) * _STIR
        total += word * (factor | 1)
    num_bytes = tl.where(turn == 0, tl.load(row + 3), 0)
    tl.atomic_add(sums + owner, tl.reduce(total, 0, _plus) + num_bytes)
