"""The tensors of a folder, in any layout of its files."""

import json
import os
import struct
import threading
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
    for name, size in (("_PART_BYTES", 48), ("_BATCH_BYTES", 200)):
        monkeypatch.setattr(snapshot_reader, name, size)


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


def open_files(folder: Path) -> list[str]:
    """The files of the folder that this process has open, by name, each as often as it is open."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sorted(os.path.basename(link) for link in links if os.path.dirname(link) == str(folder))


def test_a_reader_that_is_left_early_ends_its_threads_and_closes_its_files(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = read_tensors(tmp_path, torch.device("cpu"))
    next(tensors)
    assert open_files(tmp_path)
    tensors.close()  # type: ignore[attr-defined]  # it is a generator
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("snapshot")]
    assert not open_files(tmp_path)


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "model-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model-00001\.safetensors is not a complete safetensors file"):
        read_tensors(tmp_path, torch.device("cpu"))


@pytest.mark.parametrize(("dtype", "shape"), [("F4", [4]), ("F32", [5]), ("nn", [4]), (None, [4])])
def test_a_tensor_that_torch_cannot_hold_is_told_with_its_file(
    tmp_path: Path, dtype: str | None, shape: list[int]
) -> None:
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, 16]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor 'w' of 16 bytes is no "):
        read_tensors(tmp_path, torch.device("cpu"))


def test_a_folder_without_tensors_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no safetensors"):
        read_tensors(tmp_path / "gone", torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint32", "uint64", "complex64", "float8_e8m0fnu"])
def test_dtypes_of_quantized_checkpoints_are_read(tmp_path: Path, dtype: str) -> None:
    save_file({"scales": torch.zeros(4).to(getattr(torch, dtype))}, tmp_path / "model.safetensors")
    (tensor,) = dict(read_tensors(tmp_path, torch.device("cpu"))).values()
    assert tensor.dtype == getattr(torch, dtype)
