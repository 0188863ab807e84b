"""Weight versions in a folder: what is whole is found, what is read stays, and what is dead goes away."""

import fcntl
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.errors import InvalidRequest, StoreFailed
from engines.store.draft import OWNER, Draft, claim_draft, is_whole
from engines.store.manifest import MANIFEST, Manifest, check_bytes
from engines.store.weight_store import WeightStore, is_kept, remove_folder, remove_store
from tests.material.drafts import file_bytes, tensor, written


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


def test_a_promoted_draft_is_a_checkpoint_folder_with_a_manifest(store: WeightStore, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "x.safetensors.index.json"):
        (checkpoint / name).write_text("{}")
    folder = store.promote(written(store, 7), "3", checkpoint)
    there = {path.name for path in folder.iterdir()}
    assert there == {
        "config.json",
        "tokenizer.json",
        "model-00001.safetensors",
        "model.safetensors.index.json",
        MANIFEST,
        ".draft",
        ".label",
    }
    assert (folder / "config.json").resolve() == (checkpoint / "config.json").resolve()
    manifest = check_bytes(folder)
    assert (manifest.version, manifest.model, set(manifest.tensors)) == (3, "m", {"a", "b"})
    assert file_bytes(folder, "b") == bytes([7]) * 16
    assert store.versions == [3]


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


def test_the_version_served_and_the_one_before_are_kept(store: WeightStore) -> None:
    for version in (1, 2, 5, 6):
        store.promote(written(store, version), str(version), None)
    store.prune(served=5)
    assert store.versions == [2, 5, 6]
    store.prune(served=6)
    assert store.versions == [5, 6]
    store.prune(served=6, keep=1)
    assert {path.name for path in store.folder.glob("v*")} == {"v6"}


def test_a_version_that_is_promoted_while_others_are_pruned_stays(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.promote(written(store, 1), "1", None)
    next_one, known = written(store, 2), WeightStore.versions

    def promoted_just_after(self: WeightStore) -> list[int]:
        versions: list[int] = known.fget(self)  # type: ignore[attr-defined]
        if next_one.exists():
            store.promote(next_one, "2", None)
        return versions

    monkeypatch.setattr(WeightStore, "versions", property(promoted_just_after))
    store.prune(served=1)
    assert file_bytes(store.path(2), "a") == bytes([2]) * 16


def test_a_version_that_is_read_is_not_removed(store: WeightStore) -> None:
    for version in (1, 2, 3):
        store.promote(written(store, version), str(version), None)
    with store.reading(1) as folder:
        store.prune(served=3)
        assert file_bytes(folder, "a") == bytes([1]) * 16
    store.prune(served=3)
    assert store.versions == [2, 3]


def test_a_version_read_by_another_process_is_not_removed(store: WeightStore) -> None:
    for version in (1, 2, 3):
        store.promote(written(store, version), str(version), None)
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(1, flush=True); input()"
    path = str(store.path(1) / MANIFEST)
    with subprocess.Popen([sys.executable, "-c", hold, path], stdin=-1, stdout=-1) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        store.prune(served=3)
        assert store.path(1).is_dir()
        reader.communicate(b"\n", timeout=60)
    store.prune(served=3)
    assert not store.path(1).exists()


def test_drafts_of_dead_writers_are_removed_at_the_start_and_drafts_of_living_stay(store: WeightStore) -> None:
    dead = "import sys; from pathlib import Path; from engines.store.draft import claim_draft; " + (
        "print(claim_draft(Path(sys.argv[1]))[0], flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", dead, str(store.folder)], stdin=-1, stdout=-1) as writer:
        assert writer.stdout is not None
        folder = Path(writer.stdout.readline().decode().strip())
        store.sweep()
        assert folder.is_dir()
        writer.kill()
        writer.wait(timeout=60)
    ours = written(store, 1)
    store.sweep()
    assert not folder.exists()
    assert is_whole(ours)


def test_a_store_has_one_gateway(store: WeightStore) -> None:
    with pytest.raises(StoreFailed, match=r"kept by another gateway.*weights\.store"):
        WeightStore(store.folder)
    store.close()
    WeightStore(store.folder).close()


def test_a_gateway_started_anew_knows_only_versions_that_an_engine_is_labelled_with(store: WeightStore) -> None:
    for made in ("1-0000000a", "2-0000000b"):
        store.promote(written(store, 1), made, None)
    store.close()
    again = WeightStore(store.folder)
    assert again.versions == []
    assert not again.adopt("1-0000000b")
    assert not again.adopt("2-0000000a")
    assert not again.adopt("0")
    assert again.adopt("2-0000000b")
    again.prune(served=2)
    assert {path.name for path in again.folder.glob("v*")} == {"v2"}


def test_a_version_of_another_run_is_replaced(store: WeightStore) -> None:
    store.promote(written(store, 1), "1", None)
    store.close()
    again = WeightStore(store.folder)
    again.promote(written(again, 9), "1", None)
    assert file_bytes(again.path(1), "a") == bytes([9]) * 16


@pytest.mark.parametrize(
    "name",
    ["../other", "v1", "/etc", "draft-x/../../other", "", "draft-missing", "..", "draft-\0", "draft-" + "x" * 300],
)
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


def test_a_store_is_removed_unless_a_gateway_keeps_it(store: WeightStore) -> None:
    store.promote(written(store, 1), "1", None)
    assert not remove_store(store.folder)
    assert store.path(1).is_dir()
    store.close()
    assert remove_store(store.folder)
    assert not store.folder.exists()
    assert not remove_store(store.folder)


def test_a_draft_is_not_swept_in_the_moment_that_it_is_made(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: int, operation: int) -> None:
        store.sweep()
        locked(file, operation)

    locked = fcntl.flock
    locks = SimpleNamespace(flock=flock, LOCK_SH=fcntl.LOCK_SH, LOCK_EX=fcntl.LOCK_EX)
    monkeypatch.setattr("engines.store.draft.fcntl", locks)
    folder, owner = claim_draft(store.folder)
    assert [path.name for path in folder.iterdir()] == [OWNER]
    os.close(owner)


def test_a_draft_is_not_swept_in_the_moment_that_it_becomes_a_version(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, owner = claim_draft(store.folder)  # a trainer's
    draft = Draft(folder, "m")
    draft.add([tensor("a", 1)])
    draft.finish()
    renamed = Path.rename

    def rename(path: Path, target: Path) -> Path:
        store.sweep()
        return renamed(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    version = store.promote(folder, "1", None)
    os.close(owner)
    assert "a" in Manifest.read(version).tensors
    assert OWNER not in [path.name for path in version.iterdir()]


def test_a_writer_of_a_discarded_draft_fails_with_its_next_file_and_leaves_nothing(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rmtree(folder: Path, ignore_errors: bool) -> None:
        with pytest.raises(StoreFailed):
            draft.add([tensor("b", 1)])
        removed(folder, ignore_errors)

    removed = shutil.rmtree
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([tensor("a", 1)])
    monkeypatch.setattr("engines.store.weight_store.shutil.rmtree", rmtree)
    store.discard(folder)
    assert not any(path.is_dir() for path in store.folder.iterdir())


def test_a_withdrawn_number_is_used_again_while_its_bytes_are_being_removed(store: WeightStore) -> None:
    store.promote(written(store, 1), "1", None)
    gone = store.withdraw(1)
    assert (store.versions, store.path(1).exists()) == ([], False)
    again = store.promote(written(store, 2), "1", None)
    remove_folder(gone)
    assert file_bytes(again, "a") == bytes([2]) * 16
    assert not gone.exists()


def test_what_a_gateway_that_died_was_removing_is_removed_by_the_next(store: WeightStore) -> None:
    store.promote(written(store, 1), "1", None)
    left = [store.withdraw(1), store.throw_away(store.draft())]
    assert all(folder.is_dir() for folder in left)
    store.close()
    WeightStore(store.folder)
    assert not any(folder.exists() for folder in left)


def test_what_is_not_there_is_thrown_away_too(store: WeightStore) -> None:
    remove_folder(store.withdraw(7))
    remove_folder(store.throw_away(store.folder / "draft-none"))
    assert store.versions == []


def test_what_is_removed_meanwhile_is_not_counted(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = store.draft()
    gone, there = draft / "gone.safetensors", draft / "there.safetensors"
    there.write_bytes(b"")
    monkeypatch.setattr(Path, "glob", lambda self, _: [gone] if self == draft else [])
    assert store.has_room_for(1)


def test_a_pipe_in_the_place_of_the_keeper_s_lock_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".gateway")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(is_kept, tmp_path)
        try:
            assert asking.result(timeout=10) is False
        finally:
            os.close(os.open(tmp_path / ".gateway", os.O_RDWR))  # lets a reader go on


def test_folders_of_others_stay(store: WeightStore) -> None:
    """A user may name a folder that holds something already."""
    theirs = [store.folder / name for name in ("v1", "v7", "v03", "draft-paper", "draft-" + "0" * 31)]
    for folder in theirs:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    store.promote(written(store, 3), "3", None)
    shutil.copytree(store.path(3), store.folder / "v9")
    store.sweep()
    store.prune(served=10, keep=1)
    assert all((folder / "notes.txt").is_file() for folder in theirs)
    assert (store.folder / "v9").is_dir()
    assert not store.path(3).exists()


def test_a_version_replaces_no_folder_of_others(store: WeightStore) -> None:
    theirs = store.folder / "v1"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    with pytest.raises(StoreFailed, match=r"v1 is no weight version: give weights\.store a folder of its own"):
        store.promote(written(store, 1), "1", None)
    assert (theirs / "notes.txt").read_text() == "mine"
    assert store.versions == []


def test_records_of_earlier_releases_are_removed(store: WeightStore) -> None:
    store.close()
    records = [store.folder / name for name in (".holders.json", ".highest.json")]
    for record in records:
        record.write_text("{}")
    WeightStore(store.folder).close()
    assert not any(record.exists() for record in records)


@pytest.mark.parametrize(("committed", "found"), [("1-0000000a", 1), ("1-0000000b", None), ("0", None)])
def test_a_draft_that_became_a_version_is_one_again_unless_that_was_committed(
    store: WeightStore, committed: str, found: int | None
) -> None:
    draft = written(store, 1)
    store.promote(draft, "1-0000000a", None)
    assert store.reopen(draft, committed) == (found or draft)
    assert store.path(1).exists() == bool(found)
