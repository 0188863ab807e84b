"""The guard as its owner meets it: real processes, real signals, nothing of a tree left behind."""

import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from engines.process.guard import remove_left_segments

SOON_S = 30.0
PATIENT_S = 120.0
"""A grace that no test waits for: whoever ends well before it did not need it."""

# Prints four process ids: in a session of its own; the same, but orphaned; an ordinary child; and the command itself.
TREE = "setsid sleep 300 & echo $!; (setsid sleep 300 & echo $!); sleep 300 & echo $!; echo $$; wait"
TREE_SIZE = 4

OWNER = """
import sys, time
from pathlib import Path
from engines.process.process import Command, EngineProcess
process = EngineProcess(Command(["sh", "-c", sys.argv[2]]), Path(sys.argv[1]), 60.0)
process.start()
print(process.pid, flush=True)
time.sleep(300)
"""

SHARES = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(300)
"""


Guard = subprocess.Popen[str]
StartGuard = Callable[..., Guard]


@pytest.fixture
def start_guard() -> Iterator[StartGuard]:
    """Starts guards of a shell script; this test is their owner until it ends."""
    guards: list[Guard] = []

    def start(script: str, grace_s: float = PATIENT_S) -> Guard:
        command = [sys.executable, "-m", "engines.process.guard", str(grace_s), "sh", "-c", script]
        guards.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return guards[-1]

    yield start
    for guard in guards:
        guard.terminate()
        with guard:
            guard.wait(SOON_S)


def printed_pids(guard: Guard, count: int = 1) -> list[int]:
    assert guard.stdout is not None
    return [int(guard.stdout.readline()) for _ in range(count)]


def owner_leaves(guard: Guard) -> None:
    assert guard.stdin is not None
    guard.stdin.close()


def is_gone(pid: int) -> bool:
    """Ended, whether or not its parent has asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def those_left(pids: Iterable[int], within_s: float = SOON_S) -> list[int]:
    """Which of them still run when the time is over; returns as soon as there are none."""
    deadline = time.monotonic() + within_s
    while (alive := [pid for pid in pids if not is_gone(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


@pytest.mark.parametrize("end", [owner_leaves, Guard.terminate])
def test_the_whole_tree_ends_when_the_owner_closes_the_pipe_or_ends_the_guard(
    start_guard: StartGuard, end: Callable[[Guard], None]
) -> None:
    guard = start_guard(TREE)
    pids = printed_pids(guard, TREE_SIZE)
    assert not any(map(is_gone, pids))
    end(guard)
    guard.wait(SOON_S)
    assert those_left(pids, within_s=0) == [], "the guard ended before its tree"


def test_what_a_command_leaves_behind_ends_with_it(start_guard: StartGuard) -> None:
    guard = start_guard("setsid sleep 300 & echo $!; exit 5")
    pids = printed_pids(guard)
    assert guard.wait(SOON_S) == 5
    assert those_left(pids, within_s=0) == []


def test_the_whole_tree_ends_when_the_owner_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    command = [sys.executable, "-c", OWNER, str(log), TREE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        guard, *_ = printed_pids(owner)
        deadline = time.monotonic() + SOON_S
        while len(lines := log.read_text().splitlines()) <= TREE_SIZE and time.monotonic() < deadline:
            time.sleep(0.02)
        pids = [guard, *map(int, lines[1:])]
        assert len(pids) == 1 + TREE_SIZE
        assert not any(map(is_gone, pids))
        owner.kill()
    assert those_left(pids) == []


def test_a_command_may_end_in_its_own_way_within_the_grace(start_guard: StartGuard) -> None:
    guard = start_guard("trap 'sleep 0.2; exit 7' TERM; echo $$; while :; do sleep 0.05; done")
    printed_pids(guard)
    owner_leaves(guard)
    assert guard.wait(SOON_S) == 7


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(start_guard: StartGuard) -> None:
    guard = start_guard("trap '' TERM; echo $$; exec sleep 300", 0.3)
    pids = printed_pids(guard)
    owner_leaves(guard)
    began = time.monotonic()
    guard.wait(SOON_S)
    assert time.monotonic() - began >= 0.3
    assert those_left(pids, within_s=0) == []


def test_shared_memory_of_a_killed_python_is_removed(start_guard: StartGuard) -> None:
    guard = start_guard(f"trap '' TERM; exec {sys.executable} -c '{SHARES}'", 0.1)
    assert guard.stdout is not None
    segment = Path("/dev/shm", guard.stdout.readline().strip())
    assert segment.is_file()
    owner_leaves(guard)
    guard.wait(SOON_S)
    assert not segment.exists()


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.process.guard._MAPPED_WITHIN_S", 0.0)


def segment(path: Path) -> Path:
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    while path.stat().st_ctime >= time.time():  # the file system's clock is coarse
        time.sleep(0.001)
    return path


@pytest.mark.usefixtures("_at_once")
def test_a_segment_that_no_process_maps_is_removed(tmp_path: Path) -> None:
    left, foreign = segment(tmp_path / "sglang_loads_a_1.shm"), segment(tmp_path / "somebody_elses")
    used = segment(tmp_path / "sglang_loads_b_1.shm")
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert remove_left_segments(tmp_path) == [left]
    assert sorted(tmp_path.iterdir()) == [used, foreign]
