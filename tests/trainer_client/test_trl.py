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


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2).to(torch.bfloat16))


@pytest.mark.usefixtures("installed")
def test_a_refused_update_ends_the_broadcast_at_once_with_the_reason(gateway: PlayedGateway) -> None:
    client, began = client_of(gateway), time.monotonic()
    client.init_communicator("cpu")
    gateway.answers["/update_weights"] = lambda _: (400, {"error": "it has no such name"})
    with pytest.raises(WeightUpdateFailed, match=r"400.*it has no such name"):
        client.update_model_params(model())
    assert time.monotonic() - began < SOON_S


@pytest.mark.usefixtures("installed")
def test_a_refused_init_ends_the_rendezvous_at_once_with_the_reason(gateway: PlayedGateway) -> None:
    gateway.answers["/init_weight_transfer_engine"] = lambda _: (409, {"error": "another trainer is here"})
    began = time.monotonic()
    with pytest.raises(WeightUpdateFailed, match=r"409.*another trainer is here"):
        client_of(gateway).init_communicator("cpu")
    assert time.monotonic() - began < SOON_S


def test_a_server_without_weight_transfer_is_named(gateway: PlayedGateway) -> None:
    gateway.answers["/server_info"] = lambda _: (200, {"vllm_config": {"weight_transfer_config": None}})
    with pytest.raises(RuntimeError, match="has no weight transfer: start"):
        client_of(gateway).init_communicator("cpu")


def test_install_does_nothing_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = vllm_generation.VLLMClient, vllm_client.packed_nccl_broadcast_producer
    gloo_trl.install()
    assert (vllm_generation.VLLMClient, vllm_client.packed_nccl_broadcast_producer) == before
