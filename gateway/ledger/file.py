"""The ledger's SQLite file. Its methods are called in a transaction, by the thread that owns the connection."""

import os
import sqlite3
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gateway.ledger.batches import BatchFiles, BatchRow

OF_GROUP = -1
"""In place of a sample's number: the event is of a whole group. Of `OF_SUBMISSION` groups it is of all."""
OF_SUBMISSION = -1

_PAGE = 4096
_FREED_AT_ONCE = 1000  # pages, so that a large submission holds up no write
_WAL_BYTES = 16 << 20
_SWEPT_AT_ONCE = 64  # rows, the largest of which have a sample of a full context
_SWEEP_S = 0.05  # so that what is forgotten, of any size, holds up no write
_BUSY_S = 0.2
_LAYOUT = 2
_ROOT = 0
_TABLES = """
CREATE TABLE life (number INTEGER NOT NULL);
CREATE TABLE submissions (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, digest BLOB NOT NULL, body BLOB NOT NULL,
    began REAL NOT NULL, acked INTEGER NOT NULL, UNIQUE (owner, id));
CREATE TABLE events (
    number INTEGER, cursor INTEGER, grp INTEGER NOT NULL, sample INTEGER NOT NULL, mark TEXT NOT NULL, content BLOB,
    PRIMARY KEY (number, cursor)) WITHOUT ROWID;
CREATE TABLE prompts (number INTEGER, grp INTEGER, token_ids BLOB NOT NULL, PRIMARY KEY (number, grp)) WITHOUT ROWID;
CREATE TABLE parts (
    number INTEGER, grp INTEGER, sample INTEGER, start INTEGER, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
    text TEXT NOT NULL, spans BLOB NOT NULL, PRIMARY KEY (number, grp, sample, start)) WITHOUT ROWID;
"""


# Tables of what a submission has, with their keys.
_CONTENT = {"events": "number, cursor", "prompts": "number, grp", "parts": "number, grp, sample, start"}
_SIZES = """
SELECT number, sum(size) FROM (
    SELECT number, length(body) AS size FROM submissions UNION ALL
    SELECT number, length(content) FROM events UNION ALL
    SELECT number, length(token_ids) FROM prompts UNION ALL
    SELECT number, length(token_ids) + length(logprobs) + length(text) + length(spans) FROM parts)
WHERE number IN (SELECT number FROM submissions) GROUP BY number
"""


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event; `content` is None once it was acked. `mark` is the end of its sample or group."""

    cursor: int
    group: int
    sample: int
    mark: str
    content: bytes | None


@dataclass(frozen=True, slots=True)
class PartRow:
    """Tokens of an open sample from `start` on: int32 and float32, little-endian; `spans` is JSON."""

    start: int
    token_ids: bytes
    logprobs: bytes
    text: str
    spans: bytes


@dataclass(slots=True)
class SubmissionRow:
    """A submission as the file has it; `began` is in seconds since the epoch."""

    number: int
    owner: str
    id: str
    digest: bytes
    body: bytes
    began: float
    acked: int = 0
    events: list[EventRow] = field(default_factory=list)
    prompts: dict[int, bytes] = field(default_factory=dict)
    parts: dict[tuple[int, int], list[PartRow]] = field(default_factory=lambda: defaultdict(list))


def batch_folder(path: Path) -> Path:
    """The folder of the batches beside the file."""
    return path.with_name(f"{path.name}.batches")


class LedgerFile:
    """One connection. Another process that has the file open makes it fail as locked."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open or create the file, of at most `max_bytes`. Raise `sqlite3.Error` or `OSError`."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(path.parent)
        _make_private(path)
        self._batches = BatchFiles(batch_folder(path))
        self._of_batches: list[Callable[[], None]] = []  # writes, once their transaction is committed
        self._leavings: dict[int, None] = {}  # submissions that are forgotten, and whose content is still there
        self._dropped: set[int] = set()
        self._asked: Counter[int] = Counter()  # bytes that submissions ask for in this transaction
        self._max_bytes = max_bytes
        self._connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._set_up()
        except BaseException:
            self._connection.close()
            raise

    def _set_up(self) -> None:
        ask = self._connection.execute
        ask("PRAGMA locking_mode = EXCLUSIVE")
        ask("PRAGMA auto_vacuum = INCREMENTAL")
        if ask("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise sqlite3.OperationalError("the file system has no write-ahead log")
        ask("PRAGMA synchronous = NORMAL")
        ask(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        ask(f"PRAGMA max_page_count = {max(16, self._max_bytes // _PAGE)}")
        self.begin()
        layout = ask("PRAGMA user_version").fetchone()[0]
        if layout == 0:
            for statement in _TABLES.split(";\n")[:-1]:
                ask(statement)
            ask("INSERT INTO life VALUES (0)")
            ask(f"PRAGMA user_version = {_LAYOUT}")
        elif layout != _LAYOUT:
            raise sqlite3.DatabaseError(f"its layout is {layout}, and this release reads {_LAYOUT}")
        self.commit()

    def begin(self) -> None:
        self._asked.clear()
        self._connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._connection.execute("COMMIT")
        works, self._of_batches = self._of_batches, []
        for work in works:
            work()

    def roll_back(self) -> None:
        self._of_batches.clear()
        if self._connection.in_transaction:  # SQLite itself has, after some errors
            self._connection.execute("ROLLBACK")

    def close(self) -> None:
        self._connection.close()

    def begin_life(self, least: int) -> int:
        """Return the number of this life: more than any before, and at least `least`."""
        [(before,)] = self._connection.execute("SELECT number FROM life")
        life: int = max(before + 1, least)
        self._connection.execute("UPDATE life SET number = ?", (life,))
        return life

    def load(self) -> list[SubmissionRow]:
        """Return all submissions. Raise `sqlite3.DatabaseError` for a file that is damaged."""
        ask = self._connection.execute
        if (found := ask("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        rows = {
            row[0]: SubmissionRow(*row)
            for row in ask("SELECT number, owner, id, digest, body, began, acked FROM submissions ORDER BY number")
        }
        for table in _CONTENT:
            self._leavings |= dict.fromkeys(number for (number,) in ask(f"SELECT DISTINCT number FROM {table}"))
        for number in rows:
            self._leavings.pop(number, None)
        known = "WHERE number IN (SELECT number FROM submissions)"
        for number, *event in ask(f"SELECT number, cursor, grp, sample, mark, content FROM events {known}"):
            rows[number].events.append(EventRow(*event))
        for number, group, token_ids in ask(f"SELECT number, grp, token_ids FROM prompts {known}"):
            rows[number].prompts[group] = token_ids
        for number, group, sample, *part in ask(
            f"SELECT number, grp, sample, start, token_ids, logprobs, text, spans FROM parts {known}"
        ):
            rows[number].parts[group, sample].append(PartRow(*part))
        return list(rows.values())

    def load_batches(self) -> list[BatchRow]:
        return self._batches.load()

    @property
    def last_number(self) -> int:
        """The largest number that a submission has, or had whose content is still there; 0 without any."""
        ask = self._connection.execute
        found = [ask(f"SELECT max(number) FROM {table}").fetchone()[0] for table in ("submissions", *_CONTENT)]
        return max(number or 0 for number in found)

    @property
    def num_submissions(self) -> int:
        [(number,)] = self._connection.execute("SELECT count(*) FROM submissions")
        return int(number)

    def add_submission(self, row: SubmissionRow) -> None:
        if row.number in self._dropped:
            return
        self._asked[row.number] += len(row.body)
        self._connection.execute(
            "INSERT INTO submissions VALUES (?, ?, ?, ?, ?, ?, ?)",
            (row.number, row.owner, row.id, row.digest, row.body, row.began, row.acked),
        )
        self._add_events(row.number, row.events)
        for group, token_ids in row.prompts.items():
            self.read_prompt(row.number, group, token_ids)
        for (group, sample), parts in row.parts.items():
            for part in parts:
                self.grow(row.number, group, sample, part)

    def add_event(self, number: int, event: EventRow, *, keeps_parts: bool = False) -> None:
        """Add an event. The tokens of its sample or group are in it, or dropped, unless `keeps_parts`."""
        if number in self._dropped:
            return
        self._add_events(number, [event])
        if keeps_parts:
            return
        if event.sample == OF_GROUP:
            self._drop_parts(number, event.group)
        else:
            self.begin_again(number, event.group, event.sample)

    def _drop_parts(self, number: int, group: int) -> None:
        self._connection.execute("DELETE FROM parts WHERE number = ? AND grp = ?", (number, group))

    def _add_events(self, number: int, events: Sequence[EventRow]) -> None:
        self._asked[number] += sum(len(event.content or b"") for event in events)
        self._connection.executemany(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)",
            [(number, event.cursor, event.group, event.sample, event.mark, event.content) for event in events],
        )

    def read_prompt(self, number: int, group: int, token_ids: bytes) -> None:
        """Note a prompt as an engine read it."""
        if number in self._dropped:
            return
        self._asked[number] += len(token_ids)
        self._connection.execute("INSERT OR REPLACE INTO prompts VALUES (?, ?, ?)", (number, group, token_ids))

    def grow(self, number: int, group: int, sample: int, part: PartRow) -> None:
        if number in self._dropped:
            return
        self._asked[number] += len(part.token_ids) + len(part.logprobs) + len(part.text) + len(part.spans)
        self._connection.execute(
            "INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (number, group, sample, part.start, part.token_ids, part.logprobs, part.text, part.spans),
        )

    def begin_again(self, number: int, group: int, sample: int) -> None:
        """Drop the tokens of an open sample."""
        self._connection.execute(
            "DELETE FROM parts WHERE number = ? AND grp = ? AND sample = ?", (number, group, sample)
        )

    def give_up(self, number: int, group: int, mark: str) -> None:
        """Drop the tokens of a suspended group, and note its end."""
        self._drop_parts(number, group)
        self._connection.execute(
            "UPDATE events SET mark = ? WHERE number = ? AND grp = ? AND sample = ?", (mark, number, group, OF_GROUP)
        )

    def ack(self, number: int, cursor: int) -> None:
        """Free the events up to `cursor`; their marks stay, so that nothing is made again."""
        if number in self._dropped:
            return
        self._connection.execute(
            "UPDATE events SET content = NULL WHERE number = ?1 AND cursor <= ?2"
            " AND cursor > (SELECT acked FROM submissions WHERE number = ?1)",
            (number, cursor),
        )
        self._connection.execute("UPDATE submissions SET acked = max(acked, ?) WHERE number = ?", (cursor, number))

    def release(self, number: int) -> None:
        """Free all but the id and the cursor of a submission that is delivered."""
        if number in self._dropped:
            return
        self._connection.execute("UPDATE submissions SET body = x'' WHERE number = ?", (number,))
        for table in _CONTENT:
            self._connection.execute(f"DELETE FROM {table} WHERE number = ?", (number,))

    def forget(self, number: int) -> None:
        """Forget a submission at once, and have its content removed by `sweep`."""
        self._connection.execute("DELETE FROM submissions WHERE number = ?", (number,))
        if number not in self._dropped:
            self._leavings[number] = None

    @property
    def is_at_bound(self) -> bool:
        """True where the transaction that was rolled back asked for more than the bound leaves; False where the disk is
        full. SQLite has one error for both, and takes up to half of the bound beside the bytes asked for."""
        ask = self._connection.execute
        used: int = ask("PRAGMA page_count").fetchone()[0] - ask("PRAGMA freelist_count").fetchone()[0]
        return used * _PAGE + self._asked.total() > self._max_bytes // 2

    def drop_largest(self) -> int | None:
        """Forget the submission that takes the most room, with the room that it asked for in the transaction that was
        rolled back, and take nothing of it any more; outside of a transaction.

        Return its number; None where there is no submission.
        """
        sizes = self._asked + Counter(dict(self._connection.execute(_SIZES).fetchall()))
        if not sizes:
            return None
        [(largest, _)] = sizes.most_common(1)
        self.begin()
        self.forget(largest)
        self._dropped.add(largest)
        self.commit()
        return largest

    def sweep(self) -> bool:
        """Remove some of what forgotten submissions had; outside of a transaction. False where nothing is left."""
        if not self._leavings:
            return False
        until = time.monotonic() + _SWEEP_S
        self.begin()
        while self._leavings and time.monotonic() < until:
            number = next(iter(self._leavings))
            if not any(self._sweep(table, number) for table in _CONTENT):
                del self._leavings[number]
        self.commit()
        return True

    def _sweep(self, table: str, number: int) -> bool:
        key = _CONTENT[table]
        some = f"SELECT {key} FROM {table} WHERE number = ? LIMIT {_SWEPT_AT_ONCE}"
        return self._connection.execute(f"DELETE FROM {table} WHERE ({key}) IN ({some})", (number,)).rowcount > 0

    def add_batch(self, row: BatchRow) -> None:
        self._of_batches.append(partial(self._batches.add, row))

    def grow_batch(self, number: int, content: bytes) -> None:
        self._of_batches.append(partial(self._batches.grow, number, content))

    def forget_batch(self, number: int) -> None:
        self._of_batches.append(partial(self._batches.forget, number))

    def shrink(self) -> bool:
        """Return some free pages to the file system; outside of a transaction. False where none are left."""
        self._connection.execute(f"PRAGMA incremental_vacuum({_FREED_AT_ONCE})").fetchall()
        return bool(self._connection.execute("PRAGMA freelist_count").fetchone()[0])


def _make_private(path: Path) -> None:
    """Make the file, which its owner alone may read. SQLite gives the mode to its log, which has the prompts too."""
    for one in (path, path.with_name(f"{path.name}-wal"), batch_folder(path)):
        if os.path.lexists(one):
            _check_owner(one, os.getuid())
            one.chmod(0o700 if one.is_dir() else 0o600)
    path.touch(0o600)  # opens no file that is there: its end would take the locks of another connection of ours


def _check_folder(folder: Path) -> None:
    """Raise `PermissionError` where another user could replace the files of a folder."""
    _check_owner(folder, os.getuid(), _ROOT)
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(f"all users may replace files in {folder}: set gateway.ledger to a file elsewhere")


def _check_owner(path: Path, *owners: int) -> None:
    """Raise `PermissionError` where another user could have made the file."""
    for found in (path.lstat().st_uid, path.stat().st_uid):
        if found not in owners:
            raise PermissionError(f"{path} belongs to user {found}: set gateway.ledger to a file of your own")
