"""Digests of tensors on a GPU, made where they lie: one kernel a tensor, which reads every byte once.

torch has `hash_tensor`, but that is the exclusive or of all words: two that change places, and two equal ones that
become two others, leave it as it was.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_LANES = 1024
_ROUNDS = 16  # so many words of a lane are added up before the one atomic addition of its program
_MIX = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_STIR = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))


def sums_on_device(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Digests of tensors of one GPU as int64 numbers there, shape (len(tensors),), without waiting for them.

    Each 4-byte word is multiplied with an odd number of its place, modulo 2**64, and the products are added to the
    number of bytes: a word that changes changes the sum, and so do words that change places, but for one case in 2**32.
    """
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    for place, tensor in enumerate(tensors):
        words = _words(tensor.detach().contiguous().view(-1).view(torch.uint8))
        if words.numel():
            programs = triton.cdiv(words.numel(), _LANES * _ROUNDS)
            _add_words[(programs,)](words, sums, place, words.numel(), tensor.nbytes, LANES=_LANES, ROUNDS=_ROUNDS)
    return sums


def _words(content: torch.Tensor) -> torch.Tensor:
    """As int32, with zeros behind the last bytes."""
    if rest := content.numel() % 4:
        content = torch.nn.functional.pad(content, (0, 4 - rest))
    # Tensors packed behind each other may begin at any byte; words may not.
    is_aligned = content.data_ptr() % 4 == 0 and content.storage_offset() % 4 == 0
    return (content if is_aligned else content.clone()).view(torch.int32)


@triton.jit
def _plus(left, right):  # type: ignore[no-untyped-def]
    return left + right


# Numbers that differ from tensor to tensor shall not have the kernel compiled for each kind of them.
@triton.jit(do_not_specialize=["place", "num_words", "num_bytes"])
def _add_words(words, sums, place, num_words, num_bytes, LANES: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    program = tl.program_id(0).to(tl.int64)
    total = tl.full([LANES], 0, dtype=tl.int64)
    for turn in range(ROUNDS):
        index = (program * ROUNDS + turn) * LANES + tl.arange(0, LANES)
        word = tl.load(words + index, mask=index < num_words, other=0).to(tl.int64)
        factor = (index + 1) * _MIX
        factor = (factor ^ (factor >> 29)) * _STIR
        total += word * (factor | 1)
    tl.atomic_add(sums + place, tl.reduce(total, 0, _plus) + tl.where(program == 0, num_bytes, 0))
