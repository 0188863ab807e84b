"""Weight versions in a folder: what is written is whole, what is whole is found, and what is dead goes away."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engines.changed_elements import ChangedElements
from engines.checkpoint import read_spans
from engines.errors import InvalidRequest, StoreFailed
from engines.weight_store import (
    MANIFEST,
    ChangedTensor,
    Draft,
    Manifest,
    RawTensor,
    WeightStore,
    check_bytes,
    digest_of,
    is_whole,
    raw,
    remove_store,
)


def tensor(name: str, fill: int, size: int = 16) -> RawTensor:
    return raw(name, "uint8", [size], bytes([fill]) * size)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


def written(store: WeightStore, fill: int, *names: str) -> Path:
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([tensor(name, fill) for name in names or ("a", "b")])
    draft.finish()
    return folder


def file_bytes(folder: Path, name: str) -> bytes:
    file = Manifest.read(folder).tensors[name].file
    (span,) = (span for span in read_spans(folder)[file] if span.name == name)
    return (folder / file).read_bytes()[span.begin : span.end]


def test_a_promoted_draft_is_a_checkpoint_folder_with_a_manifest(store: WeightStore, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "x.safetensors.index.json"):
        (checkpoint / name).write_text("{}")
    folder = store.promote(written(store, 7), 3, checkpoint)
    there = {path.name for path in folder.iterdir()}
    assert there == {
        "config.json",
        "tokenizer.json",
        "model-00001.safetensors",
        "model.safetensors.index.json",
        MANIFEST,
    }
    assert (folder / "config.json").resolve() == (checkpoint / "config.json").resolve()
    manifest = check_bytes(folder)
    assert (manifest.version, manifest.model, set(manifest.tensors)) == (3, "m", {"a", "b"})
    assert file_bytes(folder, "b") == bytes([7]) * 16
    assert store.versions == [3]


def test_files_of_the_store_are_read_by_the_safetensors_library(store: WeightStore) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from engines.tensor_bytes import raw_tensor

    sent = {"w": torch.randn(3, 5, dtype=torch.bfloat16), "s": torch.tensor(2.0), "t": torch.randn(4, 6).t()}
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([raw_tensor(name, one) for name, one in sent.items()])
    draft.finish()
    loaded = load_file(folder / "model-00001.safetensors")
    assert loaded.keys() == sent.keys()
    assert all(torch.equal(loaded[name], one) for name, one in sent.items())
    check_bytes(folder)


def test_a_draft_is_no_version_until_promoted(store: WeightStore) -> None:
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([tensor("a", 1)])
    assert not is_whole(folder)
    draft.finish()
    assert is_whole(folder)
    assert store.versions == []
    with pytest.raises(StoreFailed, match="version 1 is not in"), store.reading(1):
        pass


def test_a_draft_that_failed_says_why(store: WeightStore) -> None:
    folder = store.draft()
    Draft(folder, "m").fail("the disk is slow")
    with pytest.raises(StoreFailed, match="the disk is slow"):
        is_whole(folder)


def test_the_version_served_and_the_one_before_are_kept(store: WeightStore) -> None:
    for version in (1, 2, 5, 6):
        store.promote(written(store, version), version, None)
    store.prune(served=5)
    assert store.versions == [2, 5, 6]
    store.prune(served=6)
    assert store.versions == [5, 6]
    store.prune(served=6, keep=1)
    assert {path.name for path in store.folder.glob("v*")} == {"v6"}


def test_a_version_that_is_promoted_while_others_are_pruned_stays(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.promote(written(store, 1), 1, None)
    next_one, known = written(store, 2), WeightStore.versions

    def promoted_just_after(self: WeightStore) -> list[int]:
        versions: list[int] = known.fget(self)  # type: ignore[attr-defined]
        if next_one.exists():
            store.promote(next_one, 2, None)
        return versions

    monkeypatch.setattr(WeightStore, "versions", property(promoted_just_after))
    store.prune(served=1)
    assert file_bytes(store.path(2), "a") == bytes([2]) * 16


def test_a_version_that_is_read_is_not_removed(store: WeightStore) -> None:
    for version in (1, 2, 3):
        store.promote(written(store, version), version, None)
    with store.reading(1) as folder:
        store.prune(served=3)
        assert file_bytes(folder, "a") == bytes([1]) * 16
    store.prune(served=3)
    assert store.versions == [2, 3]


def test_a_version_read_by_another_process_is_not_removed(store: WeightStore) -> None:
    for version in (1, 2, 3):
        store.promote(written(store, version), version, None)
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(1, flush=True); input()"
    path = str(store.path(1) / MANIFEST)
    with subprocess.Popen([sys.executable, "-c", hold, path], stdin=-1, stdout=-1) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        store.prune(served=3)
        assert store.path(1).is_dir()
        reader.communicate(b"\n", timeout=10)
    store.prune(served=3)
    assert not store.path(1).exists()


def test_drafts_of_dead_writers_are_removed_at_the_start_and_those_of_living_ones_are_not(store: WeightStore) -> None:
    dead = "import sys; from pathlib import Path; from engines.weight_store import claim_draft; " + (
        "print(claim_draft(Path(sys.argv[1]))[0], flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", dead, str(store.folder)], stdin=-1, stdout=-1) as writer:
        assert writer.stdout is not None
        folder = Path(writer.stdout.readline().decode().strip())
        store.sweep()
        assert folder.is_dir()
        writer.kill()
        writer.wait(timeout=10)
    ours = written(store, 1)
    store.sweep()
    assert not folder.exists()
    assert is_whole(ours)


def test_a_store_has_one_gateway(store: WeightStore) -> None:
    with pytest.raises(StoreFailed, match=r"kept by another gateway.*weights\.store"):
        WeightStore(store.folder)
    store.close()
    WeightStore(store.folder).close()


def test_a_gateway_started_anew_knows_only_versions_that_a_living_engine_holds(store: WeightStore) -> None:
    for version in (1, 2):
        store.promote(written(store, version), version, None)
    store.note_holder(2, "engine-0@17")
    store.close()
    again = WeightStore(store.folder)
    assert again.versions == []
    assert not again.adopt(1, "engine-0@17")
    assert not again.adopt(2, "engine-0@18")
    assert again.adopt(2, "engine-0@17")
    again.prune(served=2)
    assert {path.name for path in again.folder.glob("v*")} == {"v2"}


def test_a_version_of_another_run_is_replaced(store: WeightStore) -> None:
    store.promote(written(store, 1), 1, None)
    store.close()
    again = WeightStore(store.folder)
    again.promote(written(again, 9), 1, None)
    assert file_bytes(again.path(1), "a") == bytes([9]) * 16


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


@pytest.mark.parametrize("name", ["../other", "v1", "/etc", "draft-x/../../other", "", "draft-missing", ".."])
def test_a_snapshot_outside_the_store_is_refused(store: WeightStore, name: str) -> None:
    outside = store.folder.parent / "other"
    outside.mkdir()
    (outside / MANIFEST).write_text("{}")
    with pytest.raises(InvalidRequest, match="is no finished draft"):
        store.named(name)


def test_a_link_out_of_the_store_is_refused(store: WeightStore, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    (store.folder / "draft-link").symlink_to(tmp_path)
    with pytest.raises(InvalidRequest, match="is no finished draft"):
        store.named("draft-link")


def test_tensors_that_never_came_are_taken_from_the_version_before(store: WeightStore) -> None:
    before = store.promote(written(store, 1, "a", "b", "c"), 1, None)
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([tensor("b", 2)])
    draft.complete_from(before, ["a", "b", "c"])
    draft.finish()
    check_bytes(folder)
    assert [file_bytes(folder, name)[0] for name in "abc"] == [1, 2, 1]


def test_a_base_that_lacks_a_tensor_is_named(store: WeightStore) -> None:
    before = store.promote(written(store, 1, "a"), 1, None)
    draft = Draft(store.draft(), "m")
    with pytest.raises(StoreFailed, match="'a' never came, and the version before is not kept"):
        draft.complete_from(None, ["a"])
    with pytest.raises(StoreFailed, match="lacks tensor 'z'"):
        draft.complete_from(before, ["a", "z"])


def test_a_tensor_that_comes_twice_in_two_files_is_refused(store: WeightStore) -> None:
    draft = Draft(store.draft(), "m")
    draft.add([tensor("a", 1)])
    with pytest.raises(StoreFailed, match="'a' came twice"):
        draft.add([tensor("a", 2)])


def test_a_store_is_removed_unless_a_gateway_keeps_it(store: WeightStore) -> None:
    store.promote(written(store, 1), 1, None)
    assert not remove_store(store.folder)
    assert store.path(1).is_dir()
    store.close()
    assert remove_store(store.folder)
    assert not store.folder.exists()
    assert not remove_store(store.folder)


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
    store.promote(written(store, 1), 1, None)
    draft = as_changes(store, changed("a", bytes([1]) * 16, AFTER))
    store.join(draft)
    store.promote(draft, 2, None)
    manifest = check_bytes(store.path(2))
    assert (manifest.version, manifest.base) == (2, 1)
    assert (file_bytes(store.path(2), "a"), file_bytes(store.path(2), "b")) == (AFTER, bytes([2]) * 16)
    assert {name: one.changes for name, one in manifest.tensors.items()} == {"a": "changes-00002.delta", "b": ""}
    assert (store.path(2) / "changes-00002.delta").stat().st_size < 300
    assert file_bytes(store.path(1), "a") == bytes([1]) * 16


def test_a_tensor_that_did_not_change_is_one_without_changed_elements(store: WeightStore) -> None:
    store.promote(written(store, 1), 1, None)
    draft = as_changes(store, changed("a", bytes([1]) * 16, bytes([1]) * 16))
    store.join(draft)
    check_bytes(draft)
    assert file_bytes(draft, "a") == bytes([1]) * 16


def test_changes_to_a_version_that_is_not_kept_are_refused(store: WeightStore) -> None:
    store.promote(written(store, 1), 4, None)
    draft = as_changes(store, changed("a", bytes([1]) * 16, AFTER), base=3)
    with pytest.raises(
        InvalidRequest, match=r"changes to version 3, and the store keeps \[4\]: push the tensors whole"
    ):
        store.join(draft)


@pytest.mark.parametrize(
    ("name", "message"), [("a", "'a' comes as changes to xxh3_128:0, .* it is xxh3_128"), ("c", "'c' .* it is none")]
)
def test_changes_to_other_bytes_are_refused_before_any_is_written(store: WeightStore, name: str, message: str) -> None:
    store.promote(written(store, 1), 1, None)
    draft = as_changes(store, changed(name, bytes([1]) * 16, AFTER, base="xxh3_128:0"))
    there = set(draft.iterdir())
    with pytest.raises(InvalidRequest, match=message):
        store.join(draft)
    assert set(draft.iterdir()) == there


def test_changes_that_make_other_bytes_than_the_digest_says_are_found(store: WeightStore) -> None:
    store.promote(written(store, 1), 1, None)
    draft = as_changes(store, changed("a", bytes([1]) * 16, AFTER, digest=digest_of(b"others")))
    store.join(draft)
    with pytest.raises(InvalidRequest, match=r"'a' in model-00003.safetensors is damaged"):
        check_bytes(draft)


@pytest.mark.parametrize("content", [b"", b"no safetensors"])
def test_a_file_of_changes_that_is_none_is_named(store: WeightStore, content: bytes) -> None:
    store.promote(written(store, 1), 1, None)
    draft = as_changes(store, changed("a", bytes([1]) * 16, AFTER))
    (draft / "changes-00002.delta").write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"changes-00002.delta does not tell the changes of 'a'"):
        store.join(draft)


def test_changes_are_not_joined_on_a_full_disk(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.promote(written(store, 1), 1, None)
    draft = as_changes(store, changed("a", bytes([1]) * 16, AFTER))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(StoreFailed, match=r"the disk of the weight store is full"):
        store.join(draft)
    assert store.versions == [1]


def test_a_linked_file_brings_no_changes_along(store: WeightStore) -> None:
    store.promote(written(store, 1), 1, None)
    draft = as_changes(store, changed("a", bytes([1]) * 16, AFTER))
    store.join(draft)
    store.promote(draft, 2, None)
    last = store.draft()
    completed = Draft(last, "m")
    completed.add([tensor("b", 3)])
    completed.complete_from(store.path(2), ["a", "b"])
    completed.finish()
    manifest = check_bytes(last)
    assert {(one.changes, one.base) for one in manifest.tensors.values()} == {("", "")}
    assert (last / manifest.tensors["a"].file).stat().st_nlink == 2
