"""Files are checked against their manifest."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.errors import InvalidRequest, StoreFailed
from engines.store.manifest import MANIFEST, Manifest, check_bytes
from engines.store.weight_store import WeightStore
from tests.material.drafts import written

Damage = Callable[[Path], Any]
FILE = "model-00001.safetensors"


def flipped(folder: Path) -> None:
    content = bytearray((folder / FILE).read_bytes())
    content[-1] ^= 1
    (folder / FILE).write_bytes(content)


def cut_to(num_bytes: int) -> Damage:
    """Leaves so many bytes of the file, or all but so many."""
    return lambda folder: os.truncate(folder / FILE, num_bytes % (folder / FILE).stat().st_size)


def told(**change: object) -> Damage:
    """Changes what the manifest says of tensor "a"."""

    def change_manifest(folder: Path) -> None:
        tree = json.loads((folder / MANIFEST).read_text())
        tree["tensors"]["a"] |= change
        (folder / MANIFEST).write_text(json.dumps(tree))

    return change_manifest


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flipped, rf"tensor '[ab]' in {FILE} is damaged"),
        *((cut_to(num_bytes), FILE) for num_bytes in (0, 3, 100, -1)),
        (lambda folder: (folder / FILE).unlink(), FILE),
        (told(shape=[4, 4]), "the manifest calls"),
        (told(dtype="int8"), "the manifest calls"),
        (told(file="elsewhere.safetensors"), "the manifest not"),
    ],
)
def test_files_that_are_not_their_manifests_are_refused(store: WeightStore, damage: Damage, said: str) -> None:
    folder = written(store, 1)
    damage(folder)
    with pytest.raises(InvalidRequest, match=said):
        check_bytes(folder)


@pytest.mark.parametrize("change", [{"tensors": []}, {"format": 2}])
def test_a_manifest_that_is_none_is_refused(store: WeightStore, change: dict[str, object]) -> None:
    folder = written(store, 1)
    tree = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(tree | change))
    with pytest.raises(StoreFailed, match="is no manifest of a weight version"):
        Manifest.read(folder)
