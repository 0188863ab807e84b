"""Staged tensors in a worker: brought on a thread, handed out once, dropped with whatever still waits."""

import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file

from engines.errors import WeightUpdateFailed
from engines.loading import stage
from engines.loading.snapshot_reader import read_tensors
from engines.loading.stage import FolderStage, ReceivedStage
from tests.rigs.waiting import wait_until

SOON_S = 60.0
GPU = torch.device("cuda", 0)
HOST = torch.device("cpu")
INFO = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}


class Receiver:
    """Receives once the trainer sends, which is when `may_end` is set."""

    def __init__(self) -> None:
        self.stage = ReceivedStage(HOST, self.leave)
        self.may_end = threading.Event()
        self.error: Exception | None = None
        self.turn_s = 0.0

    def receive(self) -> None:
        self.stage.receive(INFO, self._receive)

    def leave(self) -> None:
        self.error = RuntimeError("the group was closed")
        self.may_end.set()

    def _receive(self, update_info: dict[str, Any]) -> None:
        self.turn_s = sys.getswitchinterval()
        assert self.may_end.wait(SOON_S)
        if self.error is not None:
            raise self.error
        self.stage.add([(name, torch.ones(2)) for name in update_info["names"]])


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


def test_a_later_announcement_without_room_is_refused_before_it_is_received(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.may_end.set()
    receiver.receive()
    wait_until(lambda: receiver.stage.is_ready, SOON_S)
    monkeypatch.setattr(stage, "room_on", lambda device: 7)
    receiver.receive()
    with pytest.raises(WeightUpdateFailed, match="8 more bytes were announced"):
        wait_until(lambda: receiver.stage.is_ready, SOON_S)
    assert [name for name, _ in receiver.stage.take()] == ["w"]


def test_a_drop_ends_a_receive_that_waits_and_keeps_nothing(receiver: Receiver) -> None:
    receiver.receive()
    receiver.stage.drop()
    with pytest.raises(RuntimeError, match="the group was closed"):
        wait_until(lambda: receiver.stage.is_ready, SOON_S)
    assert receiver.stage.take() == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {"w": torch.arange(6, dtype=torch.float32), "b": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")  # 24 and 6 bytes
    return tmp_path


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of the GPU that are free; its memory is the host's."""
    free = [30]
    monkeypatch.setattr(stage, "room_on", lambda _: free[0])
    monkeypatch.setattr(stage, "read_tensors", lambda path, _: read_tensors(path, HOST))
    monkeypatch.setattr(stage, "copy_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    for name in ("set_device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    return iter([free])


def test_what_fits_waits_in_the_gpu_and_is_taken_once(folder: Path, room: Iterator[list[int]]) -> None:
    one = FolderStage(folder, GPU)
    assert one.holds(folder)
    taken = dict(one.take())
    assert set(taken) == {"w", "b"}
    assert torch.equal(taken["w"], torch.arange(6, dtype=torch.float32))
    assert not one.holds(folder)


def test_what_does_not_fit_is_read_with_the_load(folder: Path, room: Iterator[list[int]]) -> None:
    next(room)[0] = 29
    one = FolderStage(folder, GPU)
    wait_until(lambda: one.is_ready, SOON_S)
    assert not one.holds(folder)


def test_a_drop_during_the_read_ends_it_and_the_next_read_has_its_room(
    folder: Path, room: Iterator[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (free,) = room
    may_go_on = threading.Event()
    later: list[str] = []

    def slow(*_: object) -> Iterator[tuple[str, Any]]:
        yield "w", torch.ones(6)
        free[0] = 0
        assert may_go_on.wait(SOON_S)
        try:
            for name in ("b", "c"):
                later.append(name)
                yield name, torch.ones(3)
        finally:
            free[0] = 30

    monkeypatch.setattr(stage, "read_tensors", slow)
    first = FolderStage(folder, GPU)
    wait_until(lambda: not free[0], SOON_S)
    first.drop()
    monkeypatch.setattr(stage, "read_tensors", lambda path, _: read_tensors(path, HOST))
    second = FolderStage(folder, GPU)
    may_go_on.set()
    assert not first.holds(folder)
    assert second.holds(folder)
    assert later == ["b"]
    assert dict(second.take()).keys() == {"w", "b"}
