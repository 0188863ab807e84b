"""The tensors of a checkpoint folder."""

import json
import struct
from pathlib import Path

import pytest

from engines.checkpoint import read_tensors, served_in
from engines.types import TensorMeta

Header = dict[str, tuple[str, list[int]]]


def write(file: Path, tensors: Header) -> None:
    """A safetensors file without its data, which nobody here may read."""
    entries = {name: {"dtype": d, "shape": shape, "data_offsets": [0, 0]} for name, (d, shape) in tensors.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def names(folder: Path) -> set[str]:
    return {tensor.name for tensor in read_tensors(folder) or ()}


def test_names_dtypes_and_shapes_are_as_trainers_announce_them(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": ("BF16", [2, 3]), "b": ("F32", []), "c": ("F8_E4M3", [4])})
    assert read_tensors(tmp_path) == (
        TensorMeta(name="a", dtype="bfloat16", shape=(2, 3)),
        TensorMeta(name="b", dtype="float32", shape=()),
        TensorMeta(name="c", dtype="float8_e4m3fn", shape=(4,)),
    )


def test_a_dtype_without_a_name_of_torchs_keeps_its_own(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": ("F4", [2])})
    assert read_tensors(tmp_path) == (TensorMeta(name="a", dtype="F4", shape=(2,)),)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F32", [1])})
    write(tmp_path / "model-00002-of-00002.safetensors", {"b": ("F32", [2])})
    assert names(tmp_path) == {"a", "b"}
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    assert names(tmp_path) == {"a", "b"}


def test_a_second_copy_beside_the_shards_does_not_count(tmp_path: Path) -> None:
    # Mistral's repositories hold the same weights twice, under two sets of names; vLLM loads those of the index.
    write(tmp_path / "model-00001-of-00001.safetensors", {"model.norm.weight": ("BF16", [8])})
    write(tmp_path / "consolidated.safetensors", {"norm.weight": ("BF16", [8])})
    write_index(tmp_path, {"model.norm.weight": "model-00001-of-00001.safetensors"})
    assert names(tmp_path) == {"model.norm.weight"}


def test_a_folder_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert read_tensors(tmp_path / "gone") is None


def test_a_folder_without_safetensors_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert read_tensors(tmp_path) is None


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", ["bfloat16", "float32"]), ("float32", ["float32"] * 2), ("half", ["float16"] * 2)],
)
def test_an_engine_holds_floats_in_the_dtype_it_was_started_with(dtype: str, expected: list[str]) -> None:
    codes = TensorMeta(name="codes", dtype="int8", shape=(2,))
    eights = TensorMeta(name="eights", dtype="float8_e4m3fn", shape=(2,))
    tensors = [TensorMeta(name=name, dtype=name, shape=(2,)) for name in ("bfloat16", "float32")]
    assert [tensor.dtype for tensor in served_in(dtype, tensors)] == expected
    assert served_in(dtype, [codes, eights]) == (codes, eights)
