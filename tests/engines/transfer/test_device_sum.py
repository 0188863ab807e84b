"""A kernel's digest of a tensor, run by a GPU where there is one, and by Triton's interpreter otherwise."""

import importlib
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engines.transfer import device_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel that runs here; a tensor of some bytes takes several programs of it."""
    with pytest.MonkeyPatch.context() as interpreted:
        if DEVICE == "cpu":
            interpreted.setenv("TRITON_INTERPRET", "1")
        importlib.reload(device_sum)
    monkeypatch.setattr(device_sum, "_LANES", 4)
    monkeypatch.setattr(device_sum, "_ROUNDS", 2)
    yield
    importlib.reload(device_sum)


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
def test_tensors_lie_anywhere_in_what_was_received() -> None:
    packed = torch.randint(0, 256, (103,), dtype=torch.uint8, device=DEVICE)
    assert digest(packed[3:99]) == digest(packed[3:99].clone())


@pytest.mark.usefixtures("small_programs")
def test_tensors_are_digested_together_as_one_by_one() -> None:
    tensors = [torch.randn(30, 7, dtype=torch.bfloat16), torch.empty(0, 4), torch.tensor(3.5), torch.randn(9, 2).T]
    together = device_sum.sums_on_device([tensor.to(DEVICE) for tensor in tensors]).tolist()
    assert together == [digest(tensor) for tensor in tensors]
    assert len(set(together)) == len(tensors)


@pytest.mark.usefixtures("small_programs")
def test_chunks_that_are_packed_alike_share_the_tables_of_their_kernel() -> None:
    def digests(chunk: torch.Tensor) -> list[int]:
        parts = chunk.split([64, 4, 128, 60])
        return list(device_sum.sums_on_device(parts).tolist())

    first, second = (torch.randint(0, 256, (256,), dtype=torch.uint8, device=DEVICE) for _ in range(2))
    found = [digests(first), digests(second)]
    assert found == [[digest(part) for part in chunk.split([64, 4, 128, 60])] for chunk in (first, second)]
    before = device_sum._tables.cache_info().misses
    digests(first.clone())
    assert device_sum._tables.cache_info().misses == before


@pytest.mark.usefixtures("small_programs")
def test_the_number_is_the_one_that_its_description_gives() -> None:
    words = [5, -7]
    total = 8  # bytes
    for place, word in enumerate(words, start=1):
        factor = place * 0x9E3779B97F4A7C15 % (1 << 64)
        signed = factor - (1 << 64) if factor >> 63 else factor
        total += word * ((signed ^ (signed >> 29)) * 0xBF58476D1CE4E5B9 | 1)
    assert digest(torch.tensor(words, dtype=torch.int32)) % (1 << 64) == total % (1 << 64)
