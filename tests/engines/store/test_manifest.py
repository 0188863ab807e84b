"""Files are checked against their manifest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.checkpoint import Span, read_spans
from engines.errors import InvalidRequest, StoreFailed
from engines.store import manifest
from engines.store.draft import Draft
from engines.store.manifest import MANIFEST, Manifest, check_bytes
from engines.store.weight_store import WeightStore
from tests.material.drafts import tensor, written


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


@pytest.mark.parametrize("num_bytes", [0, 3, 100, -1])
def test_a_file_that_was_cut_off_is_refused(store: WeightStore, num_bytes: int) -> None:
    folder = written(store, 1)
    path = folder / "model-00001.safetensors"
    os.truncate(path, num_bytes if num_bytes >= 0 else path.stat().st_size - 1)
    with pytest.raises(InvalidRequest, match=r"model-00001\.safetensors"):
        check_bytes(folder)


def test_a_file_that_is_missing_is_refused(store: WeightStore) -> None:
    folder = written(store, 1)
    (folder / "model-00001.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"model-00001\.safetensors"):
        check_bytes(folder)


CUT_OFF_ONCE_OPEN = """
import os, sys
from pathlib import Path
from engines.errors import InvalidRequest
from engines.store.manifest import Manifest, check_bytes

folder = Path(sys.argv[1])

class Tensors(dict):
    def get(self, name):  # the file is open
        os.truncate(folder / "model-00001.safetensors", 4096)
        return super().get(name)

read = Manifest.read(folder)
Manifest.read = lambda _: Manifest(read.model, Tensors(read.tensors))
try:
    check_bytes(folder)
except InvalidRequest as error:
    print(error)
"""


def test_a_file_that_is_cut_off_while_it_is_checked_is_refused(store: WeightStore) -> None:
    folder = store.draft()
    draft = Draft(folder, "m")
    draft.add([tensor("w", 1, 1 << 20)])
    draft.finish()
    # In its own process, which a mapped file would end.
    command = [sys.executable, "-c", CUT_OFF_ONCE_OPEN, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "ends before its header says" in ended.stdout


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


def test_a_pipe_put_in_a_files_place_during_a_check_does_not_hold_it_up(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(store, 1)

    def swapped(folder: Path) -> dict[str, list[Span]]:
        spans = read_spans(folder)
        for name in spans:
            (folder / name).unlink()
            os.mkfifo(folder / name)
        return spans

    monkeypatch.setattr(manifest, "read_spans", swapped)
    with pytest.raises(InvalidRequest, match="is no regular file"):
        check_bytes(folder)


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
