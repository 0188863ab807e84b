"""TRL's client over gloo against an HTTP server that plays a gateway, with receivers as threads of this process."""

import time
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from trl.generation import vllm_client, vllm_generation

from engines.errors import WeightUpdateFailed
from engines.process.port import free_port
from tests.rigs.stories.played_gateway import TIMEOUT_S, PlayedGateway
from trainer_client import trl as gloo_trl

pytestmark = pytest.mark.vllm

SOON_S = 30.0


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_generation, "VLLMClient", vllm_generation.VLLMClient)
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", vllm_client.packed_nccl_broadcast_producer)
    gloo_trl.install()


def client_of(gateway: PlayedGateway, timeout_s: float = TIMEOUT_S) -> Any:
    return gloo_trl.GlooVLLMClient(gateway.url, group_port=free_port(), timeout_s=timeout_s)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("route", ["/init_weight_transfer_engine", "/update_weights"])
def test_a_refusal_ends_rendezvous_and_broadcast_at_once_with_the_reason(gateway: PlayedGateway, route: str) -> None:
    def push() -> None:
        client.init_communicator("cpu")
        client.update_model_params(torch.nn.Linear(3, 5))

    gateway.answers[route] = lambda _: (409, {"error": "another trainer is here"})
    client, began = client_of(gateway), time.monotonic()
    with pytest.raises(WeightUpdateFailed, match=r"409.*another trainer is here"):
        push()
    assert time.monotonic() - began < SOON_S


def test_trl_lets_go_of_the_group_of_its_asynchronous_trainer_by_its_store() -> None:
    endpoint = gloo_trl.Endpoint("127.0.0.1", free_port(), 0, 1, 5.0)
    endpoint.join()
    endpoint.group.store = None
    with pytest.raises(Exception, match="closed the group"):
        endpoint.broadcast(torch.zeros(1))


def test_a_server_without_weight_transfer_is_named(gateway: PlayedGateway) -> None:
    gateway.answers["/server_info"] = lambda _: (200, {"vllm_config": {"weight_transfer_config": None}})
    with pytest.raises(RuntimeError, match="has no weight transfer: start"):
        client_of(gateway).init_communicator("cpu")


def test_install_does_nothing_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = vllm_generation.VLLMClient, vllm_client.packed_nccl_broadcast_producer
    gloo_trl.install()
    assert (vllm_generation.VLLMClient, vllm_client.packed_nccl_broadcast_producer) == before
