"""Which memory of a standby is shared until it sleeps. Real GPUs: docs/benchmarks.md."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from engines.inside_vllm import lean_memory
from engines.inside_vllm.lean_memory import KvCache, LeanMemory

MIB = 1 << 20
LARGE, SMALL = 200 * MIB, 2 * MIB


class PlayedPiece:
    def __init__(self, _device: int) -> None:
        self.mapped: dict[int, int] = {}
        self.is_released = False

    def map(self, address: int, num_bytes: int) -> None:
        self.mapped[address] = num_bytes

    def unmap(self, address: int, num_bytes: int) -> None:
        assert self.mapped.pop(address) == num_bytes

    def release(self) -> None:
        assert not self.mapped
        self.is_released = True


class PlayedAllocator:
    """Records the allocations that have memory of their own."""

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, Any] = {}
        self.own: set[int] = set()

    def allocate(self, address: int, num_bytes: int, tag: str) -> tuple[int, int, int, int]:
        handle = (0, num_bytes, address, address + 1)
        self.pointer_to_data[address] = SimpleNamespace(handle=handle, tag=tag, is_asleep=False)
        self.own.add(address)
        return handle

    def create(self, _device: int, _bytes: int, address: int, _place: int) -> None:
        self.own.add(address)

    def release(self, _device: int, _bytes: int, address: int, _place: int) -> None:
        self.own.remove(address)


@pytest.fixture
def allocator() -> PlayedAllocator:
    return PlayedAllocator()


@pytest.fixture
def lean(allocator: PlayedAllocator, monkeypatch: pytest.MonkeyPatch) -> LeanMemory:
    monkeypatch.setattr(lean_memory, "Piece", PlayedPiece)
    addresses = iter(range(7 << 40, 9 << 40, 1 << 40))
    monkeypatch.setattr(lean_memory, "reserved", lambda _bytes: next(addresses))
    return LeanMemory(allocator, record, allocator.create, allocator.release)


def record(allocation: lean_memory.Allocation, tag: str) -> Any:
    return SimpleNamespace(handle=allocation, tag=tag, is_asleep=False)


def parameter(address: int, num_bytes: int) -> Any:
    storage = SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: num_bytes)
    return SimpleNamespace(is_cuda=True, untyped_storage=lambda: storage)


def test_large_parameters_share_memory_and_nothing_else(lean: LeanMemory, allocator: PlayedAllocator) -> None:
    allocator.allocate(1 << 40, LARGE, "weights")
    allocator.allocate(2 << 40, LARGE, "workspace")
    allocator.allocate(3 << 40, SMALL, "weights")
    lean.registered(None, "weight", parameter(1 << 40, LARGE))
    lean.registered(None, "weight", parameter(1 << 40, LARGE))  # a tied one
    lean.registered(None, "buffer", parameter(2 << 40, LARGE))
    lean.registered(None, "bias", parameter(3 << 40, SMALL))
    lean.registered(None, "bias", None)
    assert allocator.own == {2 << 40, 3 << 40}


def test_a_parameter_in_a_segment_with_other_tensors_keeps_its_memory(
    lean: LeanMemory, allocator: PlayedAllocator
) -> None:
    allocator.allocate(1 << 40, LARGE, "weights")
    lean.registered(None, "weight", parameter(1 << 40, LARGE - 8 * MIB))
    assert allocator.own == {1 << 40}


def test_a_freed_tensor_gets_memory_of_its_own_for_the_allocator_to_return(
    lean: LeanMemory, allocator: PlayedAllocator
) -> None:
    allocator.allocate(1 << 40, LARGE, "weights")
    lean.registered(None, "weight", parameter(1 << 40, LARGE))
    lean.freed(1 << 40)
    lean.freed(2 << 40)  # was never shared
    assert allocator.own == {1 << 40}


def test_what_was_shared_is_asleep_at_the_end_and_later_memory_is_never_shared(
    lean: LeanMemory, allocator: PlayedAllocator
) -> None:
    address = lean.kv_cache(0, LARGE - 1)
    allocator.allocate(2 << 40, SMALL, "weights")
    lean.end()
    found = allocator.pointer_to_data
    assert (found[address].is_asleep, found[2 << 40].is_asleep) == (True, False)
    assert found[address].handle[:3] == (0, LARGE, address), "of whole granules, and the allocator can wake it"
    allocator.allocate(3 << 40, LARGE, "weights")
    lean.registered(None, "weight", parameter(3 << 40, LARGE))
    assert 3 << 40 in allocator.own
    lean.end()  # it sleeps a second time


def test_large_zeros_of_a_gpu_alone_lie_over_reserved_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def memory(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        asked.append((address, num_bytes, device))
        return torch.empty(num_bytes, dtype=torch.int8, device="meta")

    monkeypatch.setattr(lean_memory, "over", memory)
    gpu = torch.device("cuda:1")
    with KvCache(lambda device, num_bytes: device + num_bytes):
        large = torch.zeros((2, LARGE), dtype=torch.bfloat16, device=gpu)
        assert torch.zeros(LARGE, dtype=torch.int8).sum() == 0
        assert torch.ones(2).sum() == 2
    assert (large.shape, large.dtype) == ((2, LARGE), torch.bfloat16)
    assert asked == [(1 + 4 * LARGE, 4 * LARGE, gpu)]
