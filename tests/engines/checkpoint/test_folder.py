"""The tensors of a checkpoint folder."""

import json
import struct
from pathlib import Path

import pytest

from engines.checkpoint.folder import checkpoint_files, known_tensors, read_tensors, served_in
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


def test_a_folder_without_safetensors_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert read_tensors(tmp_path) is None


@pytest.mark.parametrize("name", ["../a.safetensors", "/a.safetensors", "deep/a.safetensors", "..", ".", "", "a\0b"])
def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, {"a": name})
    with pytest.raises(ValueError, match=r"index\.json names .* no file of its folder"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_index_of_nonsense_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json is no index of a checkpoint"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 1 << 62),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 12) + b'{"w":{"a":1}',
        struct.pack("<Q", 8) + b'{"w": 1}',
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        *(
            struct.pack("<Q", len(header)) + header
            for offsets in (b"[0]", b"[8, 0]", b"[0, 1.5]", b'["0", "1"]')
            for header in [b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": ' + offsets + b"}}"]
        ),
    ],
)
def test_a_file_that_is_cut_off_or_damaged_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        read_tensors(tmp_path)


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


def test_tensors_are_unknown_where_files_of_the_index_are_missing_or_damaged(tmp_path: Path) -> None:
    """Engines with `load_format: dummy` serve such a folder."""
    write(tmp_path / "a.safetensors", {"a": ("F32", [1])})
    assert known_tensors(tmp_path) == (TensorMeta(name="a", dtype="float32", shape=(1,)),)
    write_index(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    assert known_tensors(tmp_path) is None
    (tmp_path / "b.safetensors").write_bytes(b"short")
    assert known_tensors(tmp_path) is None
