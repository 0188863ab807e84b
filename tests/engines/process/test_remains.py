"""What is removed of a killed engine: its folder of temporary files, and segments of shared memory that nobody maps."""

import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.process import remains
from engines.process.remains import remove_left_folders, remove_left_segments

MADE = """
import os, sys, tempfile
from pathlib import Path
from typing import Any
from engines.process.remains import EngineFolder
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


def test_a_folder_that_was_removed_leaves_nothing(place: Path) -> None:
    kernels = made(place, "remove")[3]
    assert list(place.iterdir()) == []
    assert Path(kernels).parent == place  # torch makes it


def test_a_place_too_long_for_sockets_is_left(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    folder = Path(made(long, "remove")[0])
    assert folder.parent == Path("/tmp")


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remains, "_MAPPED_WITHIN_S", 0.0)


def segment(path: Path) -> Path:
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    while path.stat().st_ctime >= time.time():  # the file system's clock is coarse
        time.sleep(0.001)
    return path


@pytest.mark.usefixtures("_at_once")
def test_a_segment_that_no_process_maps_is_removed(tmp_path: Path) -> None:
    left, foreign = segment(tmp_path / "sglang_loads_a_1.shm"), segment(tmp_path / "somebody_elses")
    assert remove_left_segments(tmp_path) == [left]
    assert not left.exists()
    assert foreign.exists()


@pytest.mark.usefixtures("_at_once")
def test_a_segment_in_use_stays(tmp_path: Path) -> None:
    used = segment(tmp_path / "sglang_loads_b_1.shm")
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert remove_left_segments(tmp_path) == []
    assert used.exists()
