"""The tensors of a folder, in any layout of its files."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from engines.loading import snapshot_reader
from engines.loading.snapshot_reader import read_tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_TO_GPU", "_TO_HOST"):
        sizes = replace(getattr(snapshot_reader, name), part_bytes=48, batch_bytes=200, num_ahead=2)
        monkeypatch.setattr(snapshot_reader, name, sizes)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    first = {f"layer.{n}": torch.randn(n + 1, 7, dtype=torch.bfloat16) for n in range(20)}
    second = {
        "bytes": torch.arange(13, dtype=torch.uint8),  # what follows begins at an odd byte
        "large": torch.randn(100, 5),
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
    }
    save_file(first, folder / "model-00001.safetensors")
    save_file(second, folder / "model-00002.safetensors")
    return first | second


@pytest.mark.parametrize("device", DEVICES)
def test_every_tensor_arrives_as_it_was_written(tmp_path: Path, device: str) -> None:
    written = saved(tmp_path)
    read = {name: tensor.cpu() for name, tensor in read_tensors(tmp_path, torch.device(device))}
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_a_reader_that_is_left_early_ends_its_threads(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = read_tensors(tmp_path, torch.device("cpu"))
    next(tensors)
    tensors.close()  # type: ignore[attr-defined]  # it is a generator
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("snapshot")]


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "model-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(OSError, match=r"model-00001\.safetensors ends before"):
        list(read_tensors(tmp_path, torch.device("cpu")))


def test_a_folder_without_tensors_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no safetensors"):
        read_tensors(tmp_path / "gone", torch.device("cpu"))
