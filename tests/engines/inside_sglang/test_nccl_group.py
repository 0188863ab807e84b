"""A worker's end of the NCCL group, with a played NCCL and CUDA, and the trainer's real store."""

import ctypes
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import TCPStore

from engines.errors import WeightUpdateFailed
from engines.inside_sglang.nccl_group import KEY, NcclGroup, unique_id_of
from engines.process.port import free_port
from engines.transfer.packing import kept_streams, packed

TIMEOUT_S = 20.0
ID = bytes(range(128))
PLACE = "sglang.srt.distributed.device_communicators.pynccl_wrapper"


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class PlayedNccl:
    """`sent` are the chunks of the trainer; a broadcast without one never ends."""

    def __init__(self) -> None:
        self.sent: deque[Any] = deque()
        self.calls: list[Any] = []
        self.lib = SimpleNamespace(ncclCommAbort=lambda comm: self.calls.append(("abort", comm)))

    def ncclGetVersion(self) -> str:  # noqa: N802
        return "2.30.7"

    def ncclCommInitRank(self, world_size: int, unique_id: UniqueId, rank: int) -> str:  # noqa: N802
        assert bytes(unique_id.internal) == ID
        self.calls.append(("init", world_size, rank))
        return "comm"

    def ncclAllReduce(self, *_: Any) -> None:  # noqa: N802
        self.calls.append("warm up")

    def ncclBroadcast(self, place: int, _: int, count: int, *__: Any) -> None:  # noqa: N802
        self.calls.append("broadcast")
        Event.is_done = bool(self.sent)
        if self.sent:
            chunk = self.sent.popleft()
            assert chunk.numel() == count
            ctypes.memmove(place, chunk.data_ptr(), count)


class Event:
    """Of CUDA: done when it is recorded, unless the broadcast before it never ends."""

    is_done = True

    def record(self, stream: Any = None) -> None:
        self._is_done = Event.is_done

    def query(self) -> bool:
        return self._is_done


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> PlayedNccl:
    played = PlayedNccl()
    wrapper: Any = ModuleType(PLACE)
    wrapper.NCCLLibrary, wrapper.ncclUniqueId = lambda: played, UniqueId
    wrapper.buffer_type = wrapper.cudaStream_t = int
    wrapper.ncclDataTypeEnum = SimpleNamespace(ncclFloat32=7, ncclUint8=1)
    wrapper.ncclRedOpTypeEnum = SimpleNamespace(ncclSum=0)
    for name in (PLACE, *(PLACE.rsplit(".", depth)[0] for depth in (1, 2, 3, 4))):
        monkeypatch.setitem(sys.modules, name, wrapper if name == PLACE else ModuleType(name))
    sys.modules[PLACE.rsplit(".", 1)[0]].pynccl_wrapper = wrapper  # type: ignore[attr-defined]
    monkeypatch.setattr(Event, "is_done", True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    kept_streams.cache_clear()
    return played


@pytest.fixture
def trainer() -> Iterator[Any]:
    """The trainer's store, once somebody joins it."""
    port, made = free_port(), SimpleNamespace()
    made.port = port

    def serve() -> None:
        made.store = TCPStore(
            "127.0.0.1", port, 2, is_master=True, timeout=timedelta(seconds=TIMEOUT_S), use_libuv=False
        )
        own = UniqueId()
        ctypes.memmove(ctypes.addressof(own), ID, len(ID))
        made.store.set(KEY, pickle.dumps(own))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    made.thread = thread
    yield made
    thread.join(TIMEOUT_S)


def joined(trainer: Any, *, timeout_s: float = TIMEOUT_S, buffers: int = 2) -> NcclGroup:
    group = NcclGroup("127.0.0.1", trainer.port, 1, 2, timeout_s, torch.device("cpu"), buffers)
    group.join()
    trainer.thread.join(TIMEOUT_S)
    return group


def tensors(count: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {f"t{index}": torch.randn(3, index + 1, generator=generator) for index in range(count)}


def announced(sent: dict[str, Any]) -> list[Any]:
    return [(name, tensor.dtype, list(tensor.shape)) for name, tensor in sent.items()]


@pytest.mark.parametrize("buffers", [2, 4])
def test_chunks_are_received_beside_the_broadcasts_of_the_next(nccl: PlayedNccl, trainer: Any, buffers: int) -> None:
    group = joined(trainer, buffers=buffers)
    assert nccl.calls == [("init", 2, 1), "warm up"]
    nccl.calls.clear()
    sent, received = tensors(7), {}
    nccl.sent.extend(packed(iter(sent.items()), 40))
    chunks = len(nccl.sent)
    assert chunks > buffers

    def load(part: list[Any]) -> None:
        received.update({name: tensor.clone() for name, tensor in part})
        nccl.calls.append("load")

    group.receive(announced(sent), load, 40)
    assert list(received) == list(sent)
    assert all(torch.equal(received[name], sent[name]) for name in sent)
    assert nccl.calls[:buffers] == ["broadcast"] * buffers
    assert nccl.calls[buffers] == "load"
    assert nccl.calls.count("load") == chunks
    group.close()
    group.close()
    assert nccl.calls.count(("abort", "comm")) == 1


def test_a_broadcast_that_never_ends_is_aborted_at_its_deadline(nccl: PlayedNccl, trainer: Any) -> None:
    group = joined(trainer)
    with pytest.raises(WeightUpdateFailed, match="waited too long for all ranks to receive"):
        group.receive(announced(tensors(1)), lambda _: None, 40, timeout_s=0.3)
    assert nccl.calls[-1] == ("abort", "comm")
    with pytest.raises(WeightUpdateFailed, match="not joined, or broken"):
        group.receive(announced(tensors(1)), lambda _: None)


def test_a_join_without_all_ranks_ends_at_its_deadline(
    nccl: PlayedNccl, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(nccl, "ncclCommInitRank", lambda *_: never.wait(TIMEOUT_S))
    with pytest.raises(
        WeightUpdateFailed,
        match=r"rank 1 of 2 at 127\.0\.0\.1:.* waited too long for all ranks to join.*which is 2\.30\.7",
    ):
        joined(trainer, timeout_s=1.0)
    never.set()


class Trap:
    """Its pickle runs a command when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.abort, ()  # type: ignore[return-value]


@pytest.mark.parametrize("protocol", [3, pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL])
def test_the_id_is_read_from_a_pickled_structure(protocol: int) -> None:
    own = UniqueId()
    ctypes.memmove(ctypes.addressof(own), ID, len(ID))
    assert unique_id_of(pickle.dumps(own, protocol)) == ID


def test_nothing_of_a_pickle_runs() -> None:
    with pytest.raises(ValueError, match="holds 0 NCCL ids"):
        unique_id_of(pickle.dumps(Trap()))
