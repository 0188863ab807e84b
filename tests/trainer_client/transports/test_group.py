"""The sender over a group, against an HTTP server that plays a gateway, with receivers as threads of this process."""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("torch")

import torch

from engines.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    WeightUpdateConflict,
    WeightUpdateFailed,
)
from gateway.api import body_of, status_of
from tests.rigs.stories.played_gateway import Answer, PlayedGateway
from trainer_client import BlockingRolloutClient, WeightSender
from trainer_client.transports import channels, group
from trainer_client.transports.channels import NcclChannel

SOON_S = 30.0
TIMEOUT_S = 90.0
UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update"]


@pytest.fixture
def sender(client: BlockingRolloutClient) -> Iterator[WeightSender]:
    with WeightSender(client, timeout_s=TIMEOUT_S) as sender:
        yield sender


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4).to(torch.bfloat16))
    made.append(torch.nn.Linear(3, 4, bias=False))
    made[2].weight = made[0].weight  # tied
    return made


def refusing(error: Any) -> Callable[[dict[str, Any]], Answer]:
    return lambda _: (status_of(error), body_of(error))


def test_every_engine_holds_the_tensors_after_a_push(gateway: PlayedGateway, sender: WeightSender) -> None:
    trained = model()
    assert sender.push(trained) == 7
    for received in gateway.received:
        assert list(received) == ["0.weight", "1.weight", "1.bias"]
        assert all(torch.equal(received[name], weight) for name, weight in trained.named_parameters())


def test_a_group_that_another_trainer_has_replaced_is_opened_again_by_the_next_push(
    gateway: PlayedGateway, sender: WeightSender
) -> None:
    asked: list[tuple[str, Any]] = []

    def start(body: dict[str, Any]) -> Answer:
        asked.append((body["group"], body.get("version")))
        over = WeightUpdateConflict("another trainer has opened one")
        return (status_of(over), body_of(over)) if len(asked) == 2 else (200, {})

    gateway.answers["/start_weight_update"] = start
    sender.push(model())
    with pytest.raises(WeightUpdateConflict, match="another trainer has opened one"):
        sender.push(model())
    assert gateway.calls.count("/init_weight_transfer_engine") == gateway.calls.count("/update_weights") == 1
    assert sender.push(model(), version=7) == 7
    assert gateway.calls.count("/init_weight_transfer_engine") == 2
    places, versions = zip(*asked, strict=True)
    assert places[0] == places[1] != places[2]
    assert versions == (None, None, 7)


def test_a_refused_update_ends_the_broadcast_at_once_with_the_gateways_error(
    gateway: PlayedGateway, sender: WeightSender
) -> None:
    receive = gateway.answers["/update_weights"]
    gateway.answers["/update_weights"] = refusing(InvalidRequest("no such tensor", param="update_info.names"))
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="no such tensor") as refused:
        sender.push(model())
    assert refused.value.param == "update_info.names"
    assert time.monotonic() - began < SOON_S
    gateway.answers["/update_weights"] = receive
    assert sender.push(model()) == 7, "the next push opens a new group"
    assert gateway.calls.count("/init_weight_transfer_engine") == 2


def test_a_group_that_a_replica_left_is_formed_anew_before_anything_is_touched(
    gateway: PlayedGateway, sender: WeightSender
) -> None:
    sender.push(model())
    answers = iter([(424, body_of(WeightUpdateFailed("the transfer group is broken"))), (200, {"message": "started"})])
    gateway.answers["/start_weight_update"] = lambda _: next(answers)
    assert sender.push(model()) == 7
    assert gateway.calls.count("/init_weight_transfer_engine") == 2
    assert gateway.calls.count("/server_info") == 1


@pytest.mark.parametrize(
    ("route", "told"),
    [
        (
            "/init_weight_transfer_engine",
            r"not all engines joined the trainer at 127\.0\.0\.1:\d+ within 0\.5 s.*address",
        ),
        ("/update_weights", r"waited 0\.5 s|within 0\.5 s"),
    ],
)
def test_engines_that_never_come_end_the_push_in_time(
    gateway: PlayedGateway, client: BlockingRolloutClient, route: str, told: str
) -> None:
    def silence(_: dict[str, Any]) -> Answer:
        time.sleep(2.0)
        return 200, {"message": "late"}

    with WeightSender(client, address="127.0.0.1", timeout_s=0.5) as sender:
        gateway.answers[route] = silence
        began = time.monotonic()
        with pytest.raises((WeightUpdateFailed, DeadlineExceeded), match=told):
            sender.push(model())
    assert time.monotonic() - began < SOON_S
    assert gateway.calls.count(route) == 1


def test_nccl_without_a_gpu_is_refused_before_a_group_is_opened(
    gateway: PlayedGateway, client: BlockingRolloutClient
) -> None:
    with (
        WeightSender(client, transport="nccl", device="cpu") as sender,
        pytest.raises(ConfigError, match="device is 'cpu'"),
    ):
        sender.push(model())
    assert gateway.calls == ["/v1/weights", "/get_world_size"]


def test_nccl_without_vllm_is_refused_before_engines_wait_for_the_trainer(
    gateway: PlayedGateway, client: BlockingRolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(uuid="5f3a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_common", None)
    with (
        WeightSender(client, transport="nccl", device="cuda:0", timeout_s=SOON_S) as sender,
        pytest.raises(ConfigError, match=r"need vLLM 0\.28 or later beside the trainer"),
    ):
        sender.push(model())
    assert "/init_weight_transfer_engine" not in gateway.calls


class StuckNccl(NcclChannel):
    """Waits in a broadcast as NCCL does where a peer never comes, until its communicator is aborted."""

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self.aborted = threading.Event()

    def join(self) -> None:
        self._group = MagicMock()
        self._group.nccl.ncclCommAbort = lambda _: self.aborted.set()

    listen = join

    def send(self, tensors: Iterator[Any]) -> None:
        assert self.aborted.wait(SOON_S)
        raise WeightUpdateFailed("the NCCL group was left")


@pytest.mark.parametrize("is_refused", [True, False])
def test_an_nccl_broadcast_that_nobody_joins_is_aborted_in_time(
    gateway: PlayedGateway, client: BlockingRolloutClient, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    monkeypatch.setattr(group, "NcclChannel", StuckNccl)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="5f3a"))
    gateway.answers["/init_weight_transfer_engine"] = lambda _: (200, {})
    gateway.answers["/update_weights"] = lambda _: (200, {})
    if is_refused:
        gateway.answers["/update_weights"] = refusing(InvalidRequest("no such tensor"))
    error: Any = InvalidRequest if is_refused else WeightUpdateFailed
    with (
        WeightSender(client, transport="nccl", device="cuda:0", timeout_s=0.5) as sender,
        pytest.raises(error, match=r"no such tensor|waited 0\.5 s for all ranks to take part"),
    ):
        sender.push(model())


def test_a_group_that_nccl_refuses_is_left_so_that_the_engines_wait_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[weakref.ref[Any]] = []

    def trainer_init(info: Any) -> Any:
        class Store:
            """Held by the frames of the error, as vLLM's is."""

        store = Store()
        stores.append(weakref.ref(store))
        raise RuntimeError("NCCL error: internal error")

    monkeypatch.setattr(channels, "_trainer_init", lambda: trainer_init)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    channel = NcclChannel("127.0.0.1", 1, 2, torch.device("cuda:0"))
    with pytest.raises(WeightUpdateFailed, match="internal error; all its members need one release of NCCL"):
        channel.join()
    assert [store() for store in stores] == [None]


def test_a_push_waits_for_the_work_that_the_trainer_has_queued(
    gateway: PlayedGateway, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnGpu(torch.nn.Parameter):
        """Its last optimizer's step may still run."""

        is_cuda = True

    def current_stream(device: torch.device) -> Any:
        assert device.type == "cpu"
        return SimpleNamespace(synchronize=lambda: calls_then.append([*gateway.calls]))

    calls_then: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    sender.push({"w": OnGpu(torch.ones(2, 2), requires_grad=False)})
    assert calls_then
    assert not {*UPDATE} & {*calls_then[0]}
