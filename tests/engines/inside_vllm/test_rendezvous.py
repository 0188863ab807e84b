"""A vLLM worker looks for its trainer before it joins the group, and leaves a trainer that does not send."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from engines.inside_vllm.worker import break_group, find_trainer_first
from engines.process.port import free_port
from engines.transfer import gloo


class PlayedEngine:
    def __init__(self) -> None:
        self.joined: list[Any] = []

    def init_transfer_engine(self, init_info: Any) -> None:
        self.joined.append(init_info)


def info(port: int | None) -> SimpleNamespace:
    return SimpleNamespace(master_address=None if port is None else "127.0.0.1", master_port=port)


def test_no_group_is_joined_whose_trainer_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "LISTENS_S", 0.1)
    engine = PlayedEngine()
    find_trainer_first(engine)
    with pytest.raises(RuntimeError, match="the trainer does not listen"):
        engine.init_transfer_engine(info(free_port()))
    assert not engine.joined


def test_a_communicator_under_a_broadcast_is_aborted_and_any_other_group_closed() -> None:
    ended: list[str] = []
    nccl = SimpleNamespace(ncclCommAbort=ended.append)
    engine = SimpleNamespace(model_update_group=SimpleNamespace(nccl=nccl, comm="comm"), shutdown=lambda: None)
    break_group(engine)
    assert (ended, engine.model_update_group) == (["comm"], None)
    break_group(SimpleNamespace(shutdown=lambda: ended.append("closed")))
    assert ended == ["comm", "closed"]
