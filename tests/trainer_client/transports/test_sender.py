"""Reasons to refuse a push before a tensor moves: named, and in time."""

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from engines.errors import ConfigError, InvalidRequest
from tests.rigs.stories.played_gateway import UNREAD, PlayedGateway
from trainer_client import BlockingRolloutClient, WeightSender
from trainer_client.transports import tensors

SOON_S = 30.0
SERVED = [{"name": "w", "dtype": "bfloat16", "shape": [2, 3]}, {"name": "q", "dtype": "float8_e4m3fn", "shape": [4]}]
GPU = "GPU-5f3a"


@pytest.fixture
def gateway(gateway: PlayedGateway) -> PlayedGateway:
    replica = {"replica_id": "engine-1", "gpus": [GPU]}
    served = {"model": "tiny", "weight_version": 6, "update": None, "tensors": SERVED, "replicas": [replica]}
    gateway.answers["/v1/weights"] = lambda _: (200, served)
    return gateway


@pytest.mark.parametrize("transport", ["gloo", "nccl", "store"])
@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"other": torch.ones(2)}, "named_tensors has 'other', which the served checkpoint does not have"),
        ({"w": torch.ones(3, 2)}, r"gives \[3, 2\] for 'w', model 'tiny' has \[2, 3\]"),
        ({"w": torch.ones(2, 3, dtype=torch.int32)}, "gives 'int32' for 'w', model 'tiny' has 'bfloat16'"),
        ({"q": torch.ones(4)}, "gives 'float32' for 'q', model 'tiny' has 'float8_e4m3fn'"),
    ],
)
def test_tensors_of_another_model_are_refused_before_anything_else_is_asked(
    gateway: PlayedGateway, client: BlockingRolloutClient, transport: Any, named: Any, message: str
) -> None:
    with WeightSender(client, transport=transport) as sender, pytest.raises(InvalidRequest, match=message):
        sender.push(named)
    assert gateway.calls == ["/v1/weights"]


def test_a_port_that_somebody_has_is_named_at_once(gateway: PlayedGateway, client: BlockingRolloutClient) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with WeightSender(client, port=port) as sender, pytest.raises(ConfigError, match=f"port = {port}: the trainer"):
            sender.push({"w": torch.ones(2, 3)})
    assert "/init_weight_transfer_engine" not in gateway.calls


def test_a_replicas_gpu_is_refused_before_a_group_is_opened(
    gateway: PlayedGateway, client: BlockingRolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_device = SimpleNamespace(uuid=GPU.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_device)
    with (
        WeightSender(client, transport="nccl", device="cuda:0") as sender,
        pytest.raises(ConfigError, match=f"device = 'cuda:0' is {GPU}, also used by replica engine-1"),
    ):
        sender.push({"w": torch.ones(2, 3)})
    assert "/init_weight_transfer_engine" not in gateway.calls


def test_a_trainer_that_fails_between_two_parts_has_the_update_ended(
    gateway: PlayedGateway, client: BlockingRolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "PART_BYTES", 1)

    def making() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        yield "b", torch.ones(2)
        raise MemoryError("no room for the next one")

    gateway.answers["/v1/weights"] = lambda _: (200, UNREAD)
    with WeightSender(client, timeout_s=90) as sender, pytest.raises(MemoryError):
        sender.push(making())
    assert gateway.calls[-1] == "/v1/weight_updates"
    assert "/finish_weight_update" not in gateway.calls


def test_an_interrupt_does_not_wait_for_engines_that_never_come(
    client: BlockingRolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = client.call

    def interrupted(method: str, path: str, *rest: Any, **others: Any) -> Any:
        if path == "/init_weight_transfer_engine":
            raise KeyboardInterrupt
        return call(method, path, *rest, **others)

    monkeypatch.setattr(client, "call", interrupted)
    began = time.monotonic()
    with WeightSender(client) as sender, pytest.raises(KeyboardInterrupt):
        sender.push({"w": torch.ones(2, 3)})
    assert time.monotonic() - began < SOON_S
