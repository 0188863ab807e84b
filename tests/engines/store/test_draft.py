"""A written draft is whole, of tensors or of their changes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines.errors import InvalidRequest, StoreFailed
from engines.store.changed_elements import ChangedElements
from engines.store.draft import ChangedTensor, Draft
from engines.store.manifest import check_bytes, digest_of
from engines.store.weight_store import WeightStore
from tests.material.drafts import file_bytes, tensor, written


def test_files_of_the_store_are_read_by_the_safetensors_library(store: WeightStore) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from engines.transfer.tensor_bytes import raw_tensor

    sent = {"w": torch.randn(3, 5, dtype=torch.bfloat16), "s": torch.tensor(2.0), "t": torch.randn(4, 6).t()}
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([raw_tensor(name, one) for name, one in sent.items()])
    draft.finish()
    loaded = load_file(folder / "model-00001.safetensors")
    assert loaded.keys() == sent.keys()
    assert all(torch.equal(loaded[name], one) for name, one in sent.items())
    check_bytes(folder)


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([tensor("a", 1)])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(StoreFailed, match=r"disk of the weight store is full.*weights\.store"):
        draft.add([tensor("b", 1)])
    store.discard(folder)
    assert not list(store.folder.glob("draft-*"))
    assert not list(store.folder.glob("v*"))


def test_tensors_that_never_came_are_taken_from_the_version_before(store: WeightStore) -> None:
    before = store.promote(written(store, 1, "a", "b", "c"), "1", None)
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([tensor("b", 2)])
    draft.complete_from(before, ["a", "b", "c"])
    draft.finish()
    check_bytes(folder)
    assert [file_bytes(folder, name)[0] for name in "abc"] == [1, 2, 1]


def test_a_base_that_lacks_a_tensor_is_named(store: WeightStore) -> None:
    before = store.promote(written(store, 1, "a"), "1", None)
    draft = Draft(store.draft(), "m")
    with pytest.raises(StoreFailed, match="'a' was not sent, and the version before is not kept"):
        draft.complete_from(None, ["a"])
    with pytest.raises(StoreFailed, match="lacks tensor 'z'"):
        draft.complete_from(before, ["a", "z"])


def test_a_tensor_that_comes_twice_in_two_files_is_refused(store: WeightStore) -> None:
    draft = Draft(store.draft(), "m")
    draft.add([tensor("a", 1)])
    with pytest.raises(StoreFailed, match="'a' came twice"):
        draft.add([tensor("a", 2)])


def changed(name: str, before: bytes, after: bytes, digest: str = "", base: str = "") -> ChangedTensor:
    elements = ChangedElements.between(np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8), 1)
    return ChangedTensor(name, "uint8", [len(after)], digest or digest_of(after), base or digest_of(before), elements)


AFTER = bytes([1]) * 9 + bytes([5]) + bytes([1]) * 6


def as_changes(store: WeightStore, *tensors: ChangedTensor, base: int = 1) -> Path:
    """A draft in which tensor "b" is whole and these are changes to those of version `base`."""
    folder = store.draft()
    draft = Draft(folder, "m", base=base)
    draft.add([tensor("b", 2)])
    draft.add_changes(tensors)
    draft.finish()
    return folder


def test_a_draft_of_changes_becomes_whole_and_keeps_them(store: WeightStore) -> None:
    store.promote(written(store, 1), "1", None)
    draft = as_changes(store, changed("a", bytes([1]) * 16, AFTER))
    store.join(draft)
    store.promote(draft, "2", None)
    manifest = check_bytes(store.path(2))
    assert (manifest.version, manifest.base) == (2, 1)
    assert (file_bytes(store.path(2), "a"), file_bytes(store.path(2), "b")) == (AFTER, bytes([2]) * 16)
    assert {name: one.changes for name, one in manifest.tensors.items()} == {"a": "changes-00002.delta", "b": ""}
    assert (store.path(2) / "changes-00002.delta").stat().st_size < 300
    assert file_bytes(store.path(1), "a") == bytes([1]) * 16


def test_changes_to_a_version_that_is_not_kept_are_refused(store: WeightStore) -> None:
    store.promote(written(store, 1), "4", None)
    draft = as_changes(store, changed("a", bytes([1]) * 16, AFTER), base=3)
    with pytest.raises(
        InvalidRequest, match=r"changes to version 3, and the store keeps \[4\]: push the tensors whole"
    ):
        store.join(draft)


@pytest.mark.parametrize(
    ("name", "message"), [("a", "'a' comes as changes to xxh3_128:0, .* it is xxh3_128"), ("c", "'c' .* it is none")]
)
def test_changes_to_other_bytes_are_refused_before_any_is_written(store: WeightStore, name: str, message: str) -> None:
    store.promote(written(store, 1), "1", None)
    draft = as_changes(store, changed(name, bytes([1]) * 16, AFTER, base="xxh3_128:0"))
    there = set(draft.iterdir())
    with pytest.raises(InvalidRequest, match=message):
        store.join(draft)
    assert set(draft.iterdir()) == there


def test_changes_that_make_other_bytes_than_the_digest_says_are_found(store: WeightStore) -> None:
    store.promote(written(store, 1), "1", None)
    draft = as_changes(store, changed("a", bytes([1]) * 16, AFTER, digest=digest_of(b"others")))
    store.join(draft)
    with pytest.raises(InvalidRequest, match=r"'a' in model-00003.safetensors is damaged"):
        check_bytes(draft)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(b""), "does not hold the draft's changes"),
        (lambda path: path.write_bytes(b"no safetensors"), "does not hold the draft's changes"),
        (cut_off, "is not a complete safetensors file"),
    ],
    ids=["empty", "garbage", "cut off"],
)
def test_a_file_of_changes_that_is_none_is_named(store: WeightStore, damage: Callable[[Path], Any], said: str) -> None:
    store.promote(written(store, 1), "1", None)
    draft = as_changes(store, changed("a", bytes([1]) * 16, AFTER))
    damage(draft / "changes-00002.delta")
    with pytest.raises(InvalidRequest, match=rf"changes-00002\.delta {said}"):
        store.join(draft)


def test_a_linked_file_brings_no_changes_along(store: WeightStore) -> None:
    store.promote(written(store, 1), "1", None)
    draft = as_changes(store, changed("a", bytes([1]) * 16, AFTER))
    store.join(draft)
    store.promote(draft, "2", None)
    last = store.draft()
    completed = Draft(last, "m")
    completed.add([tensor("b", 3)])
    completed.complete_from(store.path(2), ["a", "b"])
    completed.finish()
    manifest = check_bytes(last)
    assert {(one.changes, one.base) for one in manifest.tensors.values()} == {("", "")}
    assert (last / manifest.tensors["a"].file).stat().st_nlink == 2
