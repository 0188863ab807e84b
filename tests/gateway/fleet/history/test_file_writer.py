"""Writes beside the loop, where one of them or its thread fails."""

import threading
from typing import Any

import pytest

from gateway.fleet.history.file_writer import FileWriter

SOON_S = 20.0


def test_writes_go_on_after_an_error() -> None:
    written: list[int] = []

    def fail() -> None:
        raise UnicodeEncodeError("ascii", "\xe4", 0, 1, "no such letter here")

    writer = FileWriter()
    writer.add(fail)
    writer.add(lambda: written.append(1))
    assert writer.flush(SOON_S)
    writer.add(lambda: written.append(2))
    assert writer.flush(SOON_S)
    assert written == [1, 2]


def test_writes_wait_in_their_order_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    written: list[int] = []
    writer = FileWriter()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        writer.add(lambda: written.append(1))
        assert not writer.flush(0.01)
    writer.add(lambda: written.append(2))
    assert writer.flush(SOON_S)
    assert written == [1, 2]
