"""Notes of a batch: taken in pieces of bounded size, none twice, none lost."""

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.dialects.replays import making
from gateway.dialects.replays.making import Came, Notes
from gateway.fleet.flight import Flight


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    monkeypatch.setattr(making, "_AT_ONCE", 100)
    return Notes()


def chunks_of(taken: list[Any]) -> list[bytes]:
    return [chunk for note in taken if isinstance(note, Came) for chunk in note.chunks]


def test_notes_are_taken_in_pieces(notes: Notes) -> None:
    replica: Any = SimpleNamespace(weight_version=1, replica_id="a")
    for index in range(10):
        notes.of(index).begin(replica, Flight.of([1], [1]), is_whole=False)([b"%d" % index * 50])
    assert notes.num_bytes == 500
    pieces = [notes.take() for _ in range(6)]
    assert [len(piece) for piece in pieces] == [2, 2, 2, 2, 2, 0]
    assert [chunk for piece in pieces for chunk in chunks_of(piece)] == [b"%d" % index * 50 for index in range(10)]
    assert (notes.num_bytes, notes.has_news) == (0, False)


def test_what_an_update_leaves_open_and_what_is_void_hold_up_nothing(notes: Notes) -> None:
    vouched: Any = SimpleNamespace(weight_version=1, replica_id="a")
    unknown: Any = SimpleNamespace(weight_version=None, replica_id="b")
    notes.of(0).begin(unknown, Flight.of([1], [1]), is_whole=False)([b"x" * 200])
    again = notes.of(1)
    again.begin(vouched, Flight.of([1], [1]), is_whole=False)([b"void" * 50])
    again.begin(vouched, Flight.of([1], [1]), is_whole=False)([b"one"])
    assert chunks_of(notes.take()) == [b"one"]
    assert (notes.num_bytes, notes.has_news) == (200, True)
    unknown.weight_version = 2
    assert chunks_of(notes.take()) == [b"x" * 200]
    notes.stop()
    assert notes.num_bytes == 0
