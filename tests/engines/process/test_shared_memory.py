"""Which segments of shared memory of a killed engine are removed: ours, and mapped by nobody."""

import mmap
import time
from pathlib import Path

import pytest

from engines.process import shared_memory
from engines.process.shared_memory import remove_left_segments


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_MAPPED_WITHIN_S", 0.0)


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
