"""Files of batches: what was written is read, also where a kill has cut the last write."""

import os
import time
from pathlib import Path

from gateway.ledger.batches import BatchFiles, BatchRow

ROW = BatchRow(7, b"request", b"body")


def test_a_batch_is_read_with_its_parts_in_order(tmp_path: Path) -> None:
    files = BatchFiles(tmp_path / "batches")
    files.add(ROW)
    files.grow(7, b"one")
    files.grow(7, b"")
    files.add(BatchRow(12, b"r", b""))
    assert BatchFiles(tmp_path / "batches").load() == [
        BatchRow(7, b"request", b"body", [b"one", b""]),
        BatchRow(12, b"r", b""),
    ]


def test_a_write_that_was_cut_is_left_out(tmp_path: Path) -> None:
    files = BatchFiles(tmp_path)
    files.add(ROW)
    files.grow(7, b"one")
    whole = (tmp_path / "7").read_bytes()
    for end in range(len(whole) - len(b"one") - 4, len(whole)):
        (tmp_path / "7").write_bytes(whole[:end])
        assert files.load() == [ROW]
        files.grow(7, b"two")
        assert [row.parts for row in files.load()] == [[b"two"]]
    (tmp_path / "7").write_bytes(whole[:9])
    assert files.load() == []
    assert not (tmp_path / "7").exists()


def test_a_batch_for_which_no_client_waits_any_more_is_removed(tmp_path: Path) -> None:
    files = BatchFiles(tmp_path)
    files.add(ROW)
    files.add(BatchRow(8, b"request", b"body"))
    hour_ago = time.time() - 3600
    os.utime(tmp_path / "7", (hour_ago, hour_ago))
    assert [row.number for row in files.load()] == [8]
    assert [path.name for path in tmp_path.iterdir()] == ["8"]
