"""Events of the fleet: kept in order, bounded, and over a restart."""

import os
from pathlib import Path

from gateway.fleet.history import events
from gateway.fleet.history.events import KEPT, Events

SOON_S = 20.0


def texts(found: Events) -> list[str]:
    return [event["text"] for event in found.last]


def test_events_outlive_a_gateway_and_those_before_the_file_are_kept_too(tmp_path: Path) -> None:
    first = Events()
    first.add("engine-0", "joined")
    first.keep_in(tmp_path)
    first.add("engine-0", "lost")
    first.flush(SOON_S)
    second = Events()
    second.add("gateway", "started")
    second.keep_in(tmp_path)
    assert texts(second) == ["joined", "lost", "started"]
    assert second.last[0]["subject"] == "engine-0"


def test_the_last_hundred_are_kept_and_the_file_stays_short(tmp_path: Path) -> None:
    found = Events()
    found.keep_in(tmp_path)
    for number in range(3 * events._LONGEST):
        found.add("x", str(number))
    found.flush(SOON_S)
    assert texts(found) == [str(number) for number in range(3 * events._LONGEST - KEPT, 3 * events._LONGEST)]
    (file,) = tmp_path.iterdir()
    assert len(file.read_text().splitlines()) <= events._LONGEST


def test_a_line_that_was_cut_short_is_skipped(tmp_path: Path) -> None:
    found = Events()
    found.keep_in(tmp_path)
    found.add("x", "whole")
    found.flush(SOON_S)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text() + '{"at": 1, "subj')
    after = Events()
    after.keep_in(tmp_path)
    assert texts(after) == ["whole"]


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_file(tmp_path: Path) -> None:
    found = Events()
    found.keep_in(tmp_path / "nowhere")
    found.add("x", "still known")
    assert texts(found) == ["still known"]


def test_nobody_waits_for_a_disk_that_hangs(tmp_path: Path) -> None:
    found, reader = Events(), tmp_path / events._FILE
    found.keep_in(tmp_path)
    found.flush(SOON_S)
    reader.unlink()
    os.mkfifo(reader)  # whoever opens it waits for its other end
    for number in range(5):
        found.add("x", str(number))
    found.flush(0.05)
    assert texts(found) == list("01234")
    with reader.open() as pipe:
        assert "0" in pipe.readline()
        found.flush(SOON_S)
