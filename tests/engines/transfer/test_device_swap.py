"""The kernel that exchanges tensors, run by a GPU where there is one, and by Triton's interpreter otherwise."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engines.transfer import device_swap
from tests.rigs.engines.kernels import DEVICE, small_programs_of


@pytest.fixture
def small_programs() -> Iterator[None]:
    with small_programs_of(device_swap):
        yield


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
def test_the_kernel_compiles_for_gpus() -> None:
    constants = {"LANES": device_swap._LANES, "ROUNDS": device_swap._ROUNDS}
    types = {"owners": "*i32", "table": "*i64", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(device_swap._swap_words, types, constants)
    assert "st.global" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.usefixtures("small_programs")
def test_all_pairs_are_exchanged_and_nothing_beside_them() -> None:
    sizes = [1, 8, 0, 9, 40]
    memory = torch.randn(2, sum(sizes) + len(sizes), device=DEVICE)  # a word behind each tensor is none's
    before, pairs, place = memory.clone(), [], 0
    expected = memory.clone()
    for size in sizes:
        here = slice(place, place + size)
        pairs.append((memory[0, here], memory[1, here]))
        expected[:, here] = before[:, here].flip(0)
        place += size + 1
    device_swap.DeviceSwap(pairs).run()
    assert torch.equal(memory, expected)
