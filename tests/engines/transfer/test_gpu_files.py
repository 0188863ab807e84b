"""Files of tensors that leave a GPU in pieces, and digests made there. Tensors of the host stand for those of a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from engines.store.draft import RawTensor, write_file
from engines.transfer.gpu_files import pieces
from engines.transfer.tensor_bytes import runs, sum_on_device, where_it_is

PIECE_BYTES = 64


def received(count: int) -> list[RawTensor]:
    """Tensors in memory that was received packed, and ones that lie elsewhere."""
    packed = torch.randn(count * 6)
    parts = [packed[index * 6 : index * 6 + 6].view(2, 3) for index in range(count)]
    others = [torch.arange(5, dtype=torch.uint8), torch.zeros(0, 4), torch.randn(3, 4).t(), torch.tensor(2.5)]
    return [where_it_is(f"t{index}", tensor) for index, tensor in enumerate([*parts, *others])]


@pytest.mark.parametrize("count", [1, 2, 3, 40, 200])
def test_files_that_leave_in_pieces_have_the_bytes_of_the_tensors(tmp_path: Path, count: int) -> None:
    tensors = received(count)
    memory = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    write_file(path := tmp_path / "1.safetensors", tensors, pieces(tensors, memory, None))
    found = load_file(path)
    assert all(torch.equal(found[tensor.name], tensor.owner) for tensor in tensors)


def test_neighbours_are_one_run_and_others_are_not() -> None:
    tensors = [(one.name, one.owner) for one in received(3)]
    assert [(name, len(content)) for name, content in runs(tensors)] == [("t0", 72), ("t3", 5), ("t5", 48), ("t6", 4)]


@pytest.mark.parametrize("size", [1, 7, 8, 9, 32, 69])
@pytest.mark.parametrize("place", [0, 3])
def test_each_byte_changes_the_sum(size: int, place: int) -> None:
    content = torch.randint(256, (place + size,), dtype=torch.uint8)[place:]
    total = sum_on_device(content)
    for changed in range(size):
        other = content.clone()
        other[changed] ^= 1
        assert sum_on_device(other) != total
