"""Which segments of shared memory are removed: ours, new, and mapped by nobody."""

import mmap
import os
import time
from pathlib import Path

import pytest

from engines.process import shared_memory
from engines.process.shared_memory import remove_left_segments


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_MAPPED_WITHIN_S", 0.0)


def made(path: Path) -> Path:
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    while path.stat().st_ctime >= time.time():  # the file system's clock is coarse
        time.sleep(0.001)
    return path


def test_a_segment_that_no_process_maps_is_removed(tmp_path: Path) -> None:
    left, foreign = made(tmp_path / "sglang_loads_a_1.shm"), made(tmp_path / "somebody_elses")
    assert remove_left_segments(0.0, tmp_path) == [left]
    assert not left.exists()
    assert foreign.exists()


def test_a_segment_in_use_stays(tmp_path: Path) -> None:
    used = made(tmp_path / "sglang_loads_b_1.shm")
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert remove_left_segments(0.0, tmp_path) == []
    assert used.exists()


def test_a_segment_from_before_the_engine_stays(tmp_path: Path) -> None:
    old = made(tmp_path / "sglang_loads_c_1.shm")
    assert remove_left_segments(time.time() + 60, tmp_path) == []
    assert os.path.exists(old)
