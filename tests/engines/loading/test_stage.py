"""Staged tensors in a worker: received on a thread, handed out once, dropped with whatever still waits."""

import gc
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines.errors import WeightUpdateFailed
from engines.loading import stage
from engines.loading.stage import Stage

SOON_S = 60.0
INFO = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}


class Receiver:
    """Stands where vLLM's weight transfer engine does."""

    def __init__(self) -> None:
        self.stage: Stage
        self.may_end = threading.Event()
        self.error: Exception | None = None
        self.turn_s = 0.0

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.turn_s = sys.getswitchinterval()
        assert self.may_end.wait(SOON_S)
        if self.error is not None:
            raise self.error
        self.stage.add([(name, torch.ones(2)) for name in update_info["names"]])

    def shutdown(self) -> None:
        self.error = RuntimeError("the group was closed")
        self.may_end.set()


@pytest.fixture
def receiver() -> Receiver:
    receiver = Receiver()
    receiver.stage = Stage(receiver, torch.device("cpu"))
    return receiver


def until_ready(stage: Stage) -> None:
    deadline = time.monotonic() + SOON_S
    while not stage.is_ready:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def loaded(stage: Stage) -> list[str]:
    names: list[str] = []
    stage.load_by(lambda tensors: names.extend(name for name, _ in tensors))
    return names


@pytest.mark.parametrize("error", [None, RuntimeError("the group is gone")])
def test_threads_take_short_turns_while_tensors_arrive(receiver: Receiver, error: Exception | None) -> None:
    before_s, receiver.error = sys.getswitchinterval(), error
    receiver.stage.receive(INFO)
    receiver.may_end.set()
    with pytest.raises(RuntimeError) if error else nullcontext():
        until_ready(receiver.stage)
    assert receiver.turn_s < before_s / 10
    assert sys.getswitchinterval() == before_s


def test_a_failed_receive_keeps_no_tensor(receiver: Receiver) -> None:
    kept: list[weakref.ref[Any]] = []

    def broken(update_info: dict[str, Any]) -> None:
        buffer = torch.ones(2)
        kept.append(weakref.ref(buffer))
        raise RuntimeError("lost")

    receiver.update_weights = broken  # type: ignore[method-assign]
    gc.disable()  # which would hide it, sooner or later
    try:
        receiver.stage.receive(INFO)
        with pytest.raises(RuntimeError, match="lost"):
            until_ready(receiver.stage)
        assert kept[0]() is None
    finally:
        gc.enable()


def test_a_later_announcement_without_room_is_refused_before_it_is_received(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.may_end.set()
    receiver.stage.receive(INFO)
    until_ready(receiver.stage)
    monkeypatch.setattr(stage, "room_on", lambda device: 7)
    receiver.stage.receive(INFO)
    with pytest.raises(WeightUpdateFailed, match="8 more bytes were announced"):
        until_ready(receiver.stage)
    assert loaded(receiver.stage) == ["w"]


def test_a_drop_ends_a_receive_that_waits_and_keeps_nothing(receiver: Receiver) -> None:
    receiver.stage.receive(INFO)
    receiver.stage.drop()
    with pytest.raises(RuntimeError, match="the group was closed"):
        until_ready(receiver.stage)
    assert loaded(receiver.stage) == []


def test_an_ncclcommunicator_under_a_broadcast_is_aborted(receiver: Receiver) -> None:
    aborted: list[Any] = []

    class Group:
        comm = "the communicator"

        class nccl:  # noqa: N801
            @staticmethod
            def ncclCommAbort(comm: Any) -> None:  # noqa: N802
                aborted.append(comm)

    receiver.model_update_group = Group()  # type: ignore[attr-defined]
    receiver.stage.receive(INFO)
    receiver.stage.drop()
    assert aborted == ["the communicator"]
    receiver.may_end.set()
