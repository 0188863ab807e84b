"""Which memory of a standby is shared until it sleeps. Real GPUs: docs/benchmarks.md."""

from types import SimpleNamespace
from typing import Any

import pytest

from engines.inside_vllm import lean_memory
from engines.inside_vllm.lean_memory import LeanMemory

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
    return LeanMemory(allocator, allocator.create, allocator.release)


def parameter(address: int, num_bytes: int) -> Any:
    storage = SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: num_bytes)
    return SimpleNamespace(is_cuda=True, untyped_storage=lambda: storage)


def test_large_parameters_and_the_kv_cache_share_memory_and_nothing_else(
    lean: LeanMemory, allocator: PlayedAllocator
) -> None:
    lean.allocated(allocator.allocate(1 << 40, LARGE, "kv_cache"), "kv_cache")
    lean.allocated(allocator.allocate(2 << 40, LARGE, "weights"), "weights")
    lean.allocated(allocator.allocate(3 << 40, LARGE, "workspace"), "workspace")
    lean.allocated(allocator.allocate(4 << 40, SMALL, "kv_cache"), "kv_cache")
    assert allocator.own == {2 << 40, 3 << 40, 4 << 40}
    lean.registered(None, "weight", parameter(2 << 40, LARGE))
    lean.registered(None, "weight", parameter(2 << 40, LARGE))  # a tied one
    lean.registered(None, "bias", parameter(5 << 40, SMALL))
    lean.registered(None, "bias", None)
    assert allocator.own == {3 << 40, 4 << 40}


def test_a_parameter_in_a_segment_with_other_tensors_keeps_its_memory(
    lean: LeanMemory, allocator: PlayedAllocator
) -> None:
    allocator.allocate(1 << 40, LARGE, "weights")
    lean.registered(None, "weight", parameter(1 << 40, LARGE - 8 * MIB))
    assert allocator.own == {1 << 40}


def test_a_freed_tensor_gets_memory_of_its_own_for_the_allocator_to_return(
    lean: LeanMemory, allocator: PlayedAllocator
) -> None:
    lean.allocated(allocator.allocate(1 << 40, LARGE, "kv_cache"), "kv_cache")
    lean.freed(1 << 40)
    lean.freed(2 << 40)  # was never shared
    assert allocator.own == {1 << 40}


def test_what_was_shared_is_asleep_at_the_end_and_later_memory_is_never_shared(
    lean: LeanMemory, allocator: PlayedAllocator
) -> None:
    lean.allocated(allocator.allocate(1 << 40, LARGE, "kv_cache"), "kv_cache")
    allocator.allocate(2 << 40, SMALL, "weights")
    lean.end()
    assert [one.is_asleep for one in allocator.pointer_to_data.values()] == [True, False]
    lean.allocated(allocator.allocate(3 << 40, LARGE, "kv_cache"), "kv_cache")
    assert 3 << 40 in allocator.own
    lean.end()  # it sleeps a second time
