"""The ledger's thread: order, durability before the reply, and the faults of disks."""

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gateway.ledger import ledger as ledger_module
from gateway.ledger.batches import BatchRow
from gateway.ledger.file import EventRow, LedgerFile, SubmissionRow
from gateway.ledger.ledger import Ledger, default_file

MAX_BYTES = 1 << 20
_HOLDER = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA locking_mode = EXCLUSIVE")
connection.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
time.sleep(60)
"""


def submission(number: int, size: int = 0) -> SubmissionRow:
    row = SubmissionRow(number, "owner", f"id-{number}", b"d", b"[]", 1.0)
    row.events = [EventRow(1, 0, 0, "good", bytes(size))] if size else []
    return row


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.fixture
def hold() -> Iterator[Callable[[Path], None]]:
    """Has another process hold a file."""
    holders: list[subprocess.Popen[bytes]] = []

    def start(path: Path) -> None:
        holders.append(subprocess.Popen([sys.executable, "-c", _HOLDER, str(path)], stdout=subprocess.PIPE))
        assert holders[-1].stdout is not None
        assert holders[-1].stdout.readline() == b"held\n"

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


async def put(ledger: Ledger, *rows: SubmissionRow) -> None:
    """Return once all were written, or given up."""
    done = asyncio.Event()
    for row in rows:
        ledger.put(lambda file, row=row: file.add_submission(row), lambda: None)  # type: ignore[misc]
    ledger.put(lambda file: None, done.set)
    async with asyncio.timeout(20):
        await done.wait()


def fill(file: LedgerFile, *_: object) -> None:
    """Fail as on a disk without room."""
    file._connection.execute("PRAGMA max_page_count = 1")
    file._connection.execute("INSERT INTO prompts VALUES (0, 0, zeroblob(1000000))")


async def stopped(ledger: Ledger) -> None:
    async with asyncio.timeout(20):
        while ledger.is_at_work:
            await asyncio.sleep(0.01)


async def test_callers_are_called_in_order_and_after_the_commit(tmp_path: Path) -> None:
    ledger, seen = Ledger(tmp_path / "ledger", MAX_BYTES), list[int]()
    await ledger.open()
    for number in range(50):
        ledger.put(lambda file: None, lambda number=number: seen.append(number))  # type: ignore[misc]
    assert seen == []
    await put(ledger)
    assert seen == list(range(50))
    await ledger.close()


async def test_a_full_disk_ends_the_file_and_nobody_waits(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", MAX_BYTES)
    await ledger.open()
    await put(ledger, submission(1))
    ledger.put(fill, lambda: None)
    await put(ledger, submission(2, size=1000))
    assert "full" in ledger.failure
    assert ledger.outgrown == []
    await put(ledger, submission(3))
    await stopped(ledger)
    assert names(tmp_path) == []
    await ledger.close()


@pytest.mark.parametrize("size", [1 << 17, 1 << 20])
async def test_a_write_larger_than_the_file_costs_its_submission_alone(tmp_path: Path, size: int) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path, 1 << 17)
    await ledger.open()
    await put(ledger, submission(1, size=40_000), submission(2))
    await put(ledger, submission(3, size=size), submission(4, size=1000))
    ledger.put(lambda file: file.add_event(2, EventRow(1, 0, 0, "good", bytes(size))), lambda: None)
    ledger.put(lambda file: file.add_event(3, EventRow(2, 0, 1, "good", bytes(size))), lambda: None)
    await put(ledger, submission(5))
    assert (ledger.outgrown, ledger.failure) == ([3, 2], "")
    await ledger.close()
    again = Ledger(path, 1 << 17)
    await again.open()
    assert [row.number for row in again.submissions] == [1, 4, 5]
    await again.close()


async def test_a_file_without_room_loses_its_largest_submission_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger, made = Ledger(path, MAX_BYTES), 0
    await ledger.open()
    ledger.put(lambda file: file.add_batch(BatchRow(9, b"request", b"body")), lambda: None)
    await put(ledger, submission(1, size=1000), submission(2))
    while not ledger.outgrown and not ledger.failure:
        made += 1
        event = EventRow(made, 0, made, "good", bytes(30_000))
        ledger.put(lambda file, event=event: file.add_event(2, event), lambda: None)  # type: ignore[misc]
        ledger.put(lambda file, made=made: file.grow_batch(9, b"%d" % made), lambda: None)  # type: ignore[misc]
        await put(ledger, submission(2 + made))
    assert made * 30_000 > MAX_BYTES // 2
    assert (ledger.outgrown, ledger.failure) == ([2], "")
    await ledger.close()
    again = Ledger(path, MAX_BYTES)
    await again.open()
    assert [row.number for row in again.submissions] == [1, *range(3, 3 + made)]
    [batch] = again.batches
    assert batch.parts == [b"%d" % number for number in range(1, made + 1)]  # once each, also where it was tried again
    await again.close()


async def test_a_disk_that_takes_no_write_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_STUCK_S", 0.05)
    ledger, disk, done = Ledger(tmp_path / "ledger", MAX_BYTES), threading.Event(), asyncio.Event()
    await ledger.open()

    def waits(file: LedgerFile) -> None:
        disk.wait()

    ledger.put(waits, done.set)
    async with asyncio.timeout(20):
        while not done.is_set():
            ledger.look()
            await asyncio.sleep(0.01)
    assert "took no write" in ledger.failure
    assert ledger.is_at_work
    disk.set()
    await stopped(ledger)
    assert names(tmp_path) == []


async def test_a_fault_of_the_program_ends_the_file_too(tmp_path: Path) -> None:
    ledger, done = Ledger(tmp_path / "ledger", MAX_BYTES), asyncio.Event()
    await ledger.open()

    def fails(file: LedgerFile) -> None:
        raise KeyError("what nobody foresaw")

    ledger.put(fails, done.set)
    async with asyncio.timeout(20):
        await done.wait()
    assert "what nobody foresaw" in ledger.failure
    await stopped(ledger)


def without_life(path: Path) -> None:
    """SQLite sees nothing wrong with it."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM life")


def rotten(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5 * 4096 : 20 * 4096] = b"\xff" * (15 * 4096)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"no database"),
        lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(5000)),
        rotten,
        without_life,
    ],
    ids=["other content", "a head alone", "rotten pages", "nothing of this life"],
)
async def test_a_damaged_file_is_moved_aside(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path, MAX_BYTES)
    await ledger.open()
    await put(ledger, *(submission(number, size=2000) for number in range(50)))
    await ledger.close()
    spoil(path)
    size = path.stat().st_size
    again = Ledger(path, MAX_BYTES)
    await again.open()
    assert (again.submissions, again.failure) == ([], "")
    await put(again, submission(1))
    await again.close()
    assert (tmp_path / "ledger.damaged").stat().st_size == size
    found = Ledger(path, MAX_BYTES)
    await found.open()
    assert len(found.submissions) == 1


async def test_a_disk_that_is_full_at_the_start_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger"
    first = Ledger(path, MAX_BYTES)
    await first.open()
    await put(first, submission(1))
    await first.close()
    with monkeypatch.context() as disk:
        disk.setattr(LedgerFile, "begin_life", fill)
        full = Ledger(path, MAX_BYTES)
        await full.open()
    assert "disk is full" in full.failure
    again = Ledger(path, MAX_BYTES)
    await again.open()
    assert len(again.submissions) == 1
    await again.close()


async def test_a_disk_that_hangs_at_the_start_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    first = Ledger(path, MAX_BYTES)
    await first.open()
    await put(first, submission(1))
    await first.close()
    goes_on, load = threading.Event(), LedgerFile.load

    def hang(file: LedgerFile) -> list[SubmissionRow]:
        goes_on.wait(60)
        return load(file)

    with monkeypatch.context() as disk:
        disk.setattr(LedgerFile, "load", hang)
        disk.setattr(ledger_module, "_READ_S", 0.1)
        late = Ledger(path, MAX_BYTES)
        async with asyncio.timeout(20):
            await late.open()
        assert "not read within 0.1 s" in late.failure
        await put(late, submission(2))
        goes_on.set()
        await stopped(late)
    again = Ledger(path, MAX_BYTES)
    await again.open()
    assert ([row.number for row in again.submissions], again.failure) == ([1], "")
    await again.close()


async def test_the_file_of_another_process_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(ledger_module, "_LOCKED_S", 0.2)
    path = tmp_path / "ledger"
    first = Ledger(path, MAX_BYTES)
    await first.open()
    await put(first, submission(1))
    await first.close()
    await asyncio.to_thread(hold, path)
    second = Ledger(path, MAX_BYTES)
    await second.open()
    assert second.submissions == []
    assert "another process has it open" in second.failure
    await put(second, submission(2))
    assert "ledger" in names(tmp_path)


async def test_a_folder_that_cannot_be_written_is_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    ledger = Ledger(tmp_path / "taken" / "ledger", MAX_BYTES)
    await ledger.open()
    assert ledger.submissions == []
    assert "cannot be opened" in ledger.failure
    await put(ledger, submission(1))
    await ledger.close()


def test_applications_have_files_of_their_own() -> None:
    assert default_file("a") != default_file("b")
    assert default_file("a").name == "ledger.sqlite"


def test_sqlite_is_new_enough_for_what_the_file_uses() -> None:
    assert sqlite3.sqlite_version_info >= (3, 35)
