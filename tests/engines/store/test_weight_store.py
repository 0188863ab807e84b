"""Weight versions in a folder: what is whole is found, what is read stays, and what is dead goes away."""

import subprocess
import sys
from pathlib import Path

import pytest

from engines.errors import InvalidRequest, StoreFailed
from engines.store.draft import is_whole
from engines.store.manifest import MANIFEST, check_bytes
from engines.store.weight_store import WeightStore, remove_folder, remove_store
from tests.material.drafts import file_bytes, written


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
    }
    assert (folder / "config.json").resolve() == (checkpoint / "config.json").resolve()
    manifest = check_bytes(folder)
    assert (manifest.model, set(manifest.tensors)) == ("m", {"a", "b"})
    assert file_bytes(folder, "b") == bytes([7]) * 16
    assert store.versions == [3]


def test_the_version_served_and_newer_ones_are_kept(store: WeightStore) -> None:
    for version in (1, 2, 5, 6):
        store.promote(written(store, version), str(version), None)
    store.prune(served=5)
    assert store.versions == [5, 6]
    store.prune(served=6)
    assert {path.name for path in store.folder.glob("v*")} == {"v6"}


def test_a_version_read_by_another_process_is_not_removed(store: WeightStore) -> None:
    for version in (1, 2, 3):
        store.promote(written(store, version), str(version), None)
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); print(1, flush=True); input()"
    read = store.path(1)
    path = str(read / MANIFEST)
    with subprocess.Popen([sys.executable, "-c", hold, path], stdin=-1, stdout=-1) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        store.prune(served=3)
        assert read.is_dir()
        reader.communicate(b"\n", timeout=60)
    store.prune(served=3)
    assert not read.exists()


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
    again.prune(served=2)
    assert again.adopt("2-0000000b")
    again.prune(served=2)
    assert {path.name for path in again.folder.glob("v*")} == {"v2-0000000b"}


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


def test_a_store_is_removed_unless_a_gateway_keeps_it(store: WeightStore) -> None:
    store.promote(written(store, 1), "1", None)
    assert not remove_store(store.folder)
    assert store.path(1).is_dir()
    store.close()
    assert remove_store(store.folder)
    assert not store.folder.exists()
    assert not remove_store(store.folder)


def test_a_withdrawn_number_is_used_again_while_its_bytes_are_being_removed(store: WeightStore) -> None:
    store.promote(written(store, 1), "1", None)
    gone = store.withdraw(1)
    assert (store.versions, list(store.folder.glob("v*"))) == ([], [])
    again = store.promote(written(store, 2), "1", None)
    remove_folder(gone)
    assert file_bytes(again, "a") == bytes([2]) * 16
    assert not gone.exists()


def test_folders_of_others_stay(store: WeightStore) -> None:
    """A user may name a folder that holds something already."""
    theirs = [store.folder / name for name in ("v1", "v7", "v03", "draft-paper", "draft-" + "0" * 31)]
    for folder in theirs:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    ours = store.promote(written(store, 3), "3", None)
    store.sweep()
    store.prune(served=10)
    assert all((folder / "notes.txt").is_file() for folder in theirs)
    assert not ours.exists()


def test_a_version_replaces_no_folder_of_others(store: WeightStore) -> None:
    theirs = store.folder / "v1"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    with pytest.raises(StoreFailed, match="not empty"):
        store.promote(written(store, 1), "1", None)
    assert (theirs / "notes.txt").read_text() == "mine"
    assert store.versions == []
