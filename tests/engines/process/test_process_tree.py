"""The end of a process, and trees of processes, in a /proc that is played."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.process import process_tree
from engines.process.process_tree import descendants, has_ended

Process = Callable[..., None]


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(process_tree, "_PROC", tmp_path)

    def add(pid: int, state: str, *, parent: int = 1, threads: int = 1, name: str = "engine") -> None:
        for thread in range(pid, pid + threads):
            (tmp_path / str(pid) / "task" / str(thread)).mkdir(parents=True)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) {state} {parent} {pid}\n")

    return add


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_process_has_ended_once_its_last_thread_has(process: Process, state: str) -> None:
    """The others hold memory and files for seconds after the first has become a zombie."""
    process(70, state, threads=2)
    process(80, state)
    assert (has_ended(70), has_ended(80)) == (False, True)


@pytest.mark.parametrize("state", ["R", "S", "D", "T"])
def test_a_process_that_runs_or_waits_has_not_ended(process: Process, state: str) -> None:
    process(70, state, name="an engine) Z 1 (")
    assert not has_ended(70)


def test_a_process_that_is_gone_has_ended(process: Process) -> None:
    assert has_ended(70)


def test_descendants_are_all_below_that_have_not_ended(process: Process) -> None:
    process(60, "S")
    process(70, "S", parent=60)
    process(80, "Z", parent=70, threads=3)
    process(90, "S", parent=80)
    process(100, "Z", parent=60)
    process(110, "S", parent=1)
    assert sorted(descendants(60)) == [70, 80, 90]
