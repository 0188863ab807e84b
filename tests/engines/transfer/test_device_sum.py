"""A kernel's digest of a tensor, run by a GPU where there is one, and by Triton's interpreter otherwise."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engines.transfer import device_sum
from tests.rigs.engines.kernels import DEVICE, small_programs_of


@pytest.fixture
def small_programs() -> Iterator[None]:
    with small_programs_of(device_sum):
        yield


def digest(tensor: torch.Tensor) -> int:
    return int(device_sum.sums_on_device([tensor.to(DEVICE)])[0])


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
def test_the_kernel_compiles_for_gpus() -> None:
    types = {"base": "i64", "owners": "*i32", "table": "*i64", "sums": "*i64"}
    constants = {"LANES": device_sum._LANES, "ROUNDS": device_sum._ROUNDS}
    source = ASTSource(device_sum._add_words, {**types, **dict.fromkeys(constants, "constexpr")}, constants)
    assert "atom.global" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.usefixtures("small_programs")
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 32, 69])
def test_each_byte_and_its_place_are_seen(size: int) -> None:
    content = torch.arange(size, dtype=torch.int32).mul(2654435761).view(torch.uint8)[:size].clone()
    sums = {digest(content)}
    for place in range(size):
        changed = content.clone()
        changed[place] ^= 1
        sums.add(digest(changed))
    for place in range(4, size - size % 4, 4):
        changed = content.clone()
        changed[:4], changed[place : place + 4] = content[place : place + 4], content[:4]
        sums.add(digest(changed))
    assert len(sums) == 1 + size + max(0, size // 4 - 1)
    assert digest(torch.cat([content, content.new_zeros(1)])) not in sums


@pytest.mark.usefixtures("small_programs")
def test_a_change_of_two_signs_is_seen() -> None:
    values = torch.ones(64)
    changed = values.clone()
    changed[[3, 40]] *= -1
    assert digest(values) != digest(changed)


@pytest.mark.usefixtures("small_programs")
def test_tensors_are_digested_together_as_one_by_one() -> None:
    tensors = [torch.randn(30, 7, dtype=torch.bfloat16), torch.empty(0, 4), torch.tensor(3.5), torch.randn(9, 2).T]
    together = device_sum.sums_on_device([tensor.to(DEVICE) for tensor in tensors]).tolist()
    assert together == [digest(tensor) for tensor in tensors]
    assert len(set(together)) == len(tensors)
