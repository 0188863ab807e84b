"""A file of tensors with changes is one that the safetensors library reads."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engines.checkpoint import read_spans
from engines.errors import InvalidRequest
from engines.store.changed_elements import Array, ChangedElements
from engines.store.joined_file import write_joined

TENSORS: dict[str, Array] = {
    "half": np.arange(70_000, dtype=np.float16).reshape(70, 1000),
    "bytes": np.arange(251, dtype=np.uint8),
    "scalar": np.array(3.0, dtype=np.float32),
    "empty": np.zeros((0, 4), dtype=np.float32),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.safetensors"
    save_file(TENSORS, path)
    return path


def to(new: dict[str, Array], name: str) -> ChangedElements:
    old, now = (np.frombuffer(one[name].tobytes(), np.uint8) for one in (TENSORS, new))
    return ChangedElements.between(old, now, new[name].itemsize)


def test_tensors_and_their_changes_make_a_safetensors_file(base: Path, tmp_path: Path) -> None:
    new = {name: tensor.copy() for name, tensor in TENSORS.items()}
    new["half"][3, 7], new["bytes"][250], new["scalar"][...] = -1.0, 0, 4.0
    (spans,) = read_spans(tmp_path).values()
    target = tmp_path / "joined" / "model.safetensors"
    target.parent.mkdir()
    write_joined(target, base, spans[::-1], lambda name: to(new, name))
    joined = load_file(target)
    assert joined.keys() == new.keys()
    for name, tensor in new.items():
        assert joined[name].dtype == tensor.dtype
        assert np.array_equal(joined[name], tensor)


def test_some_of_a_files_tensors_make_a_file_without_the_others(base: Path, tmp_path: Path) -> None:
    (spans,) = read_spans(tmp_path).values()
    target = tmp_path / "some"
    write_joined(target, base, [span for span in spans if span.name == "bytes"], lambda name: to(TENSORS, name))
    assert list(load_file(target)) == ["bytes"]


def test_a_base_that_was_cut_short_is_told(base: Path, tmp_path: Path) -> None:
    (spans,) = read_spans(tmp_path).values()
    base.write_bytes(base.read_bytes()[:-10])
    with pytest.raises(OSError, match="ends before its header says"):
        write_joined(tmp_path / "joined", base, spans, lambda name: to(TENSORS, name))


def test_changes_of_another_tensor_are_refused(base: Path, tmp_path: Path) -> None:
    (spans,) = read_spans(tmp_path).values()
    with pytest.raises(InvalidRequest, match="changed elements are damaged"):
        write_joined(tmp_path / "joined", base, spans, lambda name: ChangedElements(np.array([9], "u1"), np.array([1])))
