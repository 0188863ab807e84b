"""Files that another process writes from shared memory. Tensors of the host stand for those of a GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from engines.errors import StoreFailed
from engines.store.draft import RawTensor
from engines.transfer import gpu_files
from engines.transfer.gpu_files import GpuFiles
from engines.transfer.tensor_bytes import digest_on_host, where_it_is


def received(count: int) -> list[RawTensor]:
    """Tensors in memory that was received packed, and ones that lie elsewhere."""
    packed = torch.randn(count * 6)
    parts = [packed[index * 6 : index * 6 + 6].view(2, 3) for index in range(count)]
    others = [torch.arange(5, dtype=torch.uint8), torch.zeros(0, 4), torch.randn(3, 4).t()]
    return [where_it_is(f"t{index}", tensor) for index, tensor in enumerate([*parts, *others])]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuFiles]:
    monkeypatch.setattr(gpu_files, "_PIECE_BYTES", 64)
    made = GpuFiles(torch.device("cpu"))
    yield made
    made.close()


def test_files_written_by_another_process_have_the_bytes_and_digests_of_the_tensors(
    files: GpuFiles, tmp_path: Path
) -> None:
    for count in (1, 2, 3, 40, 200):  # lengths of headers, some of which are no text
        tensors = received(count)
        path = tmp_path / f"{count}.safetensors"
        assert files.write(path, tensors) == [digest_on_host(tensor.owner) for tensor in tensors]
        found = load_file(path)
        assert all(torch.equal(found[tensor.name], tensor.owner) for tensor in tensors)


def test_a_file_that_another_process_cannot_write_is_an_error_with_its_number(files: GpuFiles, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.write(tmp_path / "gone" / "1.safetensors", received(40))
    with pytest.raises(StoreFailed, match="has ended"):
        files.write(tmp_path / "1.safetensors", received(40))
