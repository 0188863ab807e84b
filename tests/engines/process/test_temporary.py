"""Which folders of temporary files are removed: ours, and locked by nobody."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.process import temporary
from engines.process.temporary import remove_left_folders

MADE = """
import os, sys, tempfile
from pathlib import Path
from typing import Any
from engines.process.temporary import EngineFolder
folder = EngineFolder()
print(folder.path, os.environ["TMPDIR"], tempfile.gettempdir(), os.environ["TORCHINDUCTOR_CACHE_DIR"])
if "remove" in sys.argv:
    folder.remove()
"""


def made(place: Path, *words: str) -> list[str]:
    """Return what a process prints that makes a folder and ends."""
    environ = {**os.environ, "TMPDIR": str(place)}
    environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, "-c", MADE, *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def place() -> Iterator[Path]:
    """A temporary folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


def test_a_folder_is_the_place_of_all_temporary_files_but_compiled_kernels(place: Path) -> None:
    folder, environ, python, kernels = made(place)
    assert folder == environ == python
    assert Path(folder).parent == place
    assert Path(kernels).parent == place
    assert len(f"{folder}/{'u' * 36}") <= 107


def test_a_folder_without_a_process_is_removed_and_others_stay(place: Path) -> None:
    left, somebody_elses = Path(made(place)[0]), place / "rollout-gateway-store"
    somebody_elses.mkdir()
    assert remove_left_folders(place) == [left]
    assert not left.exists()
    assert somebody_elses.exists()


@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_new_folder_that_another_guard_removes_before_it_is_locked_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    removed: list[Path] = []
    module = os if call == "open" else fcntl
    real = getattr(module, call)

    def removing(*arguments: Any) -> Any:
        if not removed:
            removed.extend([*place.iterdir()])
            removed[0].rmdir()  # as `remove_left_folders` of a process that came between
        return real(*arguments)

    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    with monkeypatch.context() as patch:
        patch.setattr(module, call, removing)
        folder = temporary.EngineFolder()
    assert removed != [folder.path]
    assert folder.path.exists()
    assert remove_left_folders(place) == []


def test_a_folder_is_locked_while_it_is_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Path(made(place)[0])
    is_locked: list[bool] = []

    def look(path: Path, **_: object) -> None:
        lock = os.open(path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
        is_locked.append(path == left)

    monkeypatch.setattr(shutil, "rmtree", look)
    remove_left_folders(place)
    assert is_locked == [True]


def test_a_folder_that_was_removed_leaves_nothing(place: Path) -> None:
    kernels = made(place, "remove")[3]
    assert list(place.iterdir()) == []
    assert Path(kernels).parent == place  # torch makes it


def test_a_link_is_no_folder_of_ours(place: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (place / "rollout-gateway-engine-link").symlink_to(tmp_path / "kept")
    assert remove_left_folders(place) == []
    assert (tmp_path / "kept").exists()


def test_a_place_too_long_for_sockets_is_left(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    folder = Path(made(long, "remove")[0])
    assert folder.parent == Path("/tmp")
