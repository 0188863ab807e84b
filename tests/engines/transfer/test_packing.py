"""Tensors over the bytes of a packed chunk are those that vLLM makes, and the chunk's own bytes."""

import math
from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

import torch

from engines.transfer.packing import packed, unpack_quickly, unpacked

Announced = Sequence[tuple[tuple[int, ...], torch.dtype]]

EVEN: Announced = (
    ((3, 4), torch.bfloat16),
    ((2, 1, 5), torch.float32),
    ((), torch.float32),
    ((0, 3), torch.bfloat16),
    ((8,), torch.float8_e4m3fn),
    ((7,), torch.uint8),
)
ODD: Announced = (((3,), torch.uint8), ((2, 2), torch.float32), ((5,), torch.bfloat16))


Known = tuple[list[str], list[list[int]], list[torch.dtype], list[int]]


def chunk(announced: Announced) -> tuple[torch.Tensor, Known]:
    """Random bytes, and what a receiver knows of them."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in announced]
    names = [str(place) for place in range(len(announced))]
    whole = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8)
    return whole, (names, [list(shape) for shape, _ in announced], [dtype for _, dtype in announced], sizes)


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("announced", [EVEN, ODD])
def test_each_tensor_has_its_bytes_its_shape_and_its_dtype(announced: Announced) -> None:
    whole, known = chunk(announced)
    found = unpacked(whole, *known)
    assert [name for name, _ in found] == known[0]
    assert [(tuple(one.shape), one.dtype) for _, one in found] == list(announced)
    assert b"".join(content(one) for _, one in found) == content(whole)
    assert all(one.is_contiguous() for _, one in found)


def test_vllm_makes_the_same_and_takes_ours_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    vllms = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor")
    monkeypatch.setattr(vllms, "unpack_tensor", vllms.unpack_tensor)
    whole, known = chunk(EVEN)
    theirs = vllms.unpack_tensor(whole, *known)
    ours = unpacked(whole, *known)
    for (name, one), (other_name, other) in zip(theirs, ours, strict=True):
        assert (name, one.shape, one.stride(), one.dtype) == (other_name, other.shape, other.stride(), other.dtype)
        assert content(one) == content(other)
    unpack_quickly()
    assert vllms.unpack_tensor is unpacked


def test_a_parameter_that_is_trained_is_packed_without_a_graph() -> None:
    trained = [("w", torch.nn.Parameter(torch.ones(3))), ("v", torch.nn.Parameter(torch.ones(3)))]
    for count in (1, 2):
        (whole,) = packed(iter(trained[:count]), 1 << 20)
        assert (len(whole), whole.requires_grad) == (12 * count, False)
