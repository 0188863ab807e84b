"""Files are checked against their manifest."""

import json
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


def test_a_manifest_of_nonsense_is_named(store: WeightStore) -> None:
    folder = store.draft()
    (folder / MANIFEST).write_text('{"tensors": []}')
    with pytest.raises(StoreFailed, match="is no manifest of a weight version"):
        Manifest.read(folder)
