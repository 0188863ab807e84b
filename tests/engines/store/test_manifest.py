"""Files are checked against their manifest."""

import json
import os
from pathlib import Path

import pytest

from engines.errors import InvalidRequest, StoreFailed
from engines.store.manifest import MANIFEST, Manifest, check_bytes
from engines.store.weight_store import WeightStore
from tests.material.drafts import written


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


def test_a_damaged_file_is_found_by_its_digest(store: WeightStore) -> None:
    folder = written(store, 1)
    path = folder / "model-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"tensor '[ab]' in model-00001.safetensors is damaged"):
        check_bytes(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": [4, 4]}, "the manifest calls"),
        ({"dtype": "int8"}, "the manifest calls"),
        ({"file": "elsewhere.safetensors"}, "the manifest not"),
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused(
    store: WeightStore, change: dict[str, object], said: str
) -> None:
    folder = written(store, 1)
    tree = json.loads((folder / MANIFEST).read_text())
    tree["tensors"]["a"] |= change
    (folder / MANIFEST).write_text(json.dumps(tree))
    with pytest.raises(InvalidRequest, match=said):
        check_bytes(folder)


@pytest.mark.parametrize("key", ["file", "changes"])
@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "..", "."])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(store: WeightStore, key: str, name: str) -> None:
    folder = written(store, 1)
    tree = json.loads((folder / MANIFEST).read_text())
    tree["tensors"]["a"][key] = name
    (folder / MANIFEST).write_text(json.dumps(tree))
    with pytest.raises(StoreFailed, match="no file of its folder"):
        Manifest.read(folder)


@pytest.mark.parametrize("key", ["version", "base"])
def test_a_version_that_is_no_number_is_refused(store: WeightStore, key: str) -> None:
    folder = written(store, 1)
    tree = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(tree | {key: "1/../../elsewhere"}))
    with pytest.raises(StoreFailed, match="is no version"):
        Manifest.read(folder)


def test_a_pipe_in_place_of_a_manifest_is_refused_without_being_opened(store: WeightStore) -> None:
    folder = store.draft()
    os.mkfifo(folder / MANIFEST)
    with pytest.raises(StoreFailed, match="is no regular file"):
        Manifest.read(folder)


def test_a_manifest_of_nonsense_is_named(store: WeightStore) -> None:
    folder = store.draft()
    (folder / MANIFEST).write_text('{"tensors": []}')
    with pytest.raises(StoreFailed, match="is no manifest of a weight version"):
        Manifest.read(folder)
