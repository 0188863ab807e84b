"""The ledger's file: it gives back what was written, survives nothing that is damaged, and stays small."""

import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ledger.batches import BatchRow
from gateway.ledger.file import OF_GROUP, EventRow, LedgerFile, PartRow, SubmissionRow

MAX_BYTES = 1 << 20


def row(number: int, **fields: object) -> SubmissionRow:
    return replace(SubmissionRow(number, "owner", f"id-{number}", b"d", b"[]", 1.0), **fields)  # type: ignore[arg-type]


def opened(path: Path, max_bytes: int = MAX_BYTES) -> LedgerFile:
    file = LedgerFile(path, max_bytes)
    file.begin()
    return file


def closed(file: LedgerFile) -> None:
    file.commit()
    file.close()


def loaded(path: Path) -> list[SubmissionRow]:
    file = opened(path)
    rows = file.load()
    closed(file)
    return rows


def swept(file: LedgerFile) -> None:
    while file.sweep():
        pass


def event(cursor: int, group: int, sample: int, content: bytes | None = b"content") -> EventRow:
    return EventRow(cursor, group, sample, "good", content)


def test_lives_grow_whatever_the_clock_says(tmp_path: Path) -> None:
    lives = []
    for least in (100, 50, 0, 300):
        file = opened(tmp_path / "ledger")
        lives.append(file.begin_life(least))
        closed(file)
    assert lives == [100, 101, 102, 300]


def test_a_file_of_another_layout_is_not_read(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "ledger")
    connection.execute("PRAGMA user_version = 77")
    connection.close()
    with pytest.raises(sqlite3.DatabaseError, match="layout is 77"):
        LedgerFile(tmp_path / "ledger", MAX_BYTES)


def test_others_cannot_read_the_file(tmp_path: Path) -> None:
    closed(opened(tmp_path / "folder" / "ledger"))
    assert (tmp_path / "folder" / "ledger").stat().st_mode & 0o77 == 0
    assert (tmp_path / "folder").stat().st_mode & 0o77 == 0


def test_others_cannot_read_its_log_in_a_folder_that_they_may_enter(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    log = tmp_path / "ledger-wal"
    file = opened(tmp_path / "ledger")
    file.add_submission(row(1, body=b"a prompt"))
    file.commit()
    assert b"a prompt" in log.read_bytes()
    assert log.stat().st_mode & 0o777 == 0o600
    log.chmod(0o644)  # as an earlier release left it
    kept = log.read_bytes(), (tmp_path / "ledger").read_bytes()
    file.close()
    log.write_bytes(kept[0])
    (tmp_path / "ledger").write_bytes(kept[1])
    assert [one.body for one in loaded(tmp_path / "ledger")] == [b"a prompt"]
    assert not log.exists() or log.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("name", ["ledger", "ledger-wal", "ledger.batches"])
def test_what_another_user_has_made_in_its_place_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir() if name == "ledger.batches" else (tmp_path / name).touch()
    us, real = os.getuid(), Path.lstat
    theirs = os.stat_result([us + 1 if place == 4 else value for place, value in enumerate(real(tmp_path / name))])
    monkeypatch.setattr(Path, "lstat", lambda path: theirs if path.name == name else real(path))
    with pytest.raises(PermissionError, match=f"{name} belongs to user {us + 1}"):
        LedgerFile(tmp_path / "ledger", MAX_BYTES)


def test_a_folder_in_which_others_may_replace_files_has_no_ledger(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="all users may replace files"):
        LedgerFile(tmp_path / "ledger", MAX_BYTES)
    tmp_path.chmod(0o1777)  # as /var/tmp: a file there is its owner's
    closed(opened(tmp_path / "ledger"))


LOCKED = """
import sqlite3, sys
sqlite3.connect(sys.argv[1], timeout=0).execute("SELECT count(*) FROM life")
"""


def test_a_second_look_from_this_process_leaves_the_lock_against_others(tmp_path: Path) -> None:
    file = opened(tmp_path / "ledger")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        LedgerFile(tmp_path / "ledger", MAX_BYTES)
    other = subprocess.run([sys.executable, "-c", LOCKED, str(tmp_path / "ledger")], capture_output=True, text=True)
    assert "database is locked" in other.stderr
    closed(file)


def test_the_file_never_grows_beyond_its_bound(tmp_path: Path) -> None:
    file = opened(tmp_path / "ledger", 1 << 17)
    large = row(1, events=[event(cursor, 0, 0, bytes(1000)) for cursor in range(1000)])
    with pytest.raises(sqlite3.OperationalError, match="full"):
        file.add_submission(large)
    file.close()
    assert (tmp_path / "ledger").stat().st_size <= 1 << 17


def test_space_of_what_was_forgotten_is_returned(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    file = LedgerFile(path, 1 << 30)
    for number in range(200):
        file.begin()
        file.add_submission(row(number, events=[event(1, 0, 0, bytes(100_000))]))
        file.ack(number, 1)
        file.release(number)
        file.forget(number)
        file.commit()
        swept(file)
        file.shrink()
    file.close()
    assert path.stat().st_size < 300_000  # 20 MB went through it


def test_batches_are_written_with_their_transaction_or_not_at_all(tmp_path: Path) -> None:
    file = opened(tmp_path / "ledger")
    file.add_batch(BatchRow(7, b"request", b"body"))
    file.grow_batch(7, b"one")
    file.roll_back()
    assert file.load_batches() == []
    file.begin()
    file.add_batch(BatchRow(7, b"request", b"body"))
    file.grow_batch(7, b"two")
    file.commit()
    assert [batch.parts for batch in file.load_batches()] == [[b"two"]]
    file.begin()
    file.forget_batch(7)
    file.commit()
    assert file.load_batches() == []
    file.close()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "grow", "end", "end_group", "again", "ack", "release", "forget", "reopen"]),
        st.integers(0, 2),
        st.integers(0, 1),
        st.integers(0, 2),
    ),
    max_size=40,
)


@settings(max_examples=30)
@given(OPERATIONS)
def test_the_file_equals_plain_objects_after_any_operations(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "file"
    rows: dict[int, SubmissionRow] = {}
    file, cursor = opened(path), 0
    for name, number, group, sample in operations:
        cursor += 1
        known = rows.get(number)
        if name == "reopen":
            closed(file)
            file = opened(path)
        elif name == "submit" and known is None:
            rows[number] = row(number)
            file.add_submission(rows[number])
        elif known is None:
            continue
        elif name == "grow":
            part = PartRow(cursor, b"%d" % cursor, b"", "t", b"[]")
            known.parts[group, sample].append(part)
            file.grow(number, group, sample, part)
        elif name == "end":
            known.events.append(event(cursor, group, sample))
            known.parts.pop((group, sample), None)
            file.add_event(number, known.events[-1])
        elif name == "end_group":
            known.events.append(event(cursor, group, OF_GROUP))
            for key in [key for key in known.parts if key[0] == group]:
                del known.parts[key]
            file.add_event(number, known.events[-1])
        elif name == "again":
            known.parts.pop((group, sample), None)
            file.begin_again(number, group, sample)
        elif name == "ack" and known.events:
            known.acked = known.events[len(known.events) // 2].cursor
            known.events = [replace(one, content=None) if one.cursor <= known.acked else one for one in known.events]
            file.ack(number, known.acked)
        elif name == "release":
            known.body, known.events = b"", []
            known.parts.clear()
            file.release(number)
        elif name == "forget":
            del rows[number]
            file.forget(number)
            file.commit()
            swept(file)  # numbers are taken again here
            file.begin()
    closed(file)
    assert loaded(path) == [rows[number] for number in sorted(rows)]
