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
from tests.rigs.stories.played_gateway import TIMEOUT_S, Answer, PlayedGateway
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
def test_every_engine_holds_the_trainers_weights_after_an_update(gateway: PlayedGateway) -> None:
    client, trained = client_of(gateway), model()
    client.init_communicator("cpu")
    client.update_model_params(trained)
    for received in gateway.received:
        assert received.keys() == dict(trained.named_parameters()).keys()
        assert all(torch.equal(received[name], weight) for name, weight in trained.named_parameters())
    client.close_communicator()


@pytest.mark.usefixtures("installed")
def test_an_error_among_the_tensors_of_an_update_ends_it_without_a_commit(gateway: PlayedGateway) -> None:
    client = client_of(gateway)
    client.init_communicator("cpu")

    def push_half() -> None:
        with client.weight_update():
            client.update_named_param("a", torch.ones(3))
            raise ValueError("of the trainer")

    with pytest.raises(ValueError, match="of the trainer"):
        push_half()
    assert gateway.calls[-3:] == ["/start_weight_update", "/update_weights", "/v1/weight_updates"]
    with client.weight_update():
        client.update_named_param("a", torch.ones(3))
    assert gateway.calls[-3:] == ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    client.close_communicator()


@pytest.mark.usefixtures("installed")
def test_a_refused_update_ends_at_once_and_the_next_goes_over_another_group(
    gateway: PlayedGateway,
) -> None:
    client = client_of(gateway)
    client.init_communicator("cpu")
    taken, began = gateway.answers["/update_weights"], time.monotonic()
    gateway.answers["/update_weights"] = lambda _: (400, {"error": "it has no such name"})
    with pytest.raises(WeightUpdateFailed, match=r"400.*it has no such name"):
        client.update_model_params(model())
    assert time.monotonic() - began < SOON_S
    gateway.answers["/update_weights"] = taken
    client.update_model_params(model())
    assert gateway.calls.count("/init_weight_transfer_engine") == 2
    client.close_communicator()


@pytest.mark.usefixtures("installed")
def test_a_refused_init_ends_the_rendezvous_at_once_with_the_reason(gateway: PlayedGateway) -> None:
    gateway.answers["/init_weight_transfer_engine"] = lambda _: (409, {"error": "another trainer is here"})
    began = time.monotonic()
    with pytest.raises(WeightUpdateFailed, match=r"409.*another trainer is here"):
        client_of(gateway).init_communicator("cpu")
    assert time.monotonic() - began < SOON_S


@pytest.mark.usefixtures("installed")
def test_a_weight_call_without_an_answer_ends_in_time_and_is_not_replayed(gateway: PlayedGateway) -> None:
    client = client_of(gateway, timeout_s=1.0)
    client.init_communicator("cpu")

    def silence(_: dict[str, Any]) -> Answer:
        time.sleep(3.0)
        return 200, {"message": "late"}

    gateway.answers["/finish_weight_update"] = silence
    with pytest.raises(WeightUpdateFailed, match="timed out"):
        client.update_model_params(model())
    assert gateway.calls.count("/finish_weight_update") == 1


@pytest.mark.usefixtures("installed")
def test_an_update_whose_connection_drops_is_made_again(gateway: PlayedGateway) -> None:
    client = client_of(gateway)
    client.init_communicator("cpu")
    receive = gateway.answers["/update_weights"]
    answers = iter([lambda _: None, receive])
    gateway.answers["/update_weights"] = lambda body: next(answers)(body)
    client.update_model_params(model())
    assert gateway.calls.count("/update_weights") == 2
    client.close_communicator()


@pytest.mark.usefixtures("installed")
def test_a_group_that_is_over_is_opened_again_before_the_update(gateway: PlayedGateway) -> None:
    client = client_of(gateway)
    client.init_communicator("cpu")
    answers = iter([(424, {"error": "the group is gone, as after a restart of the gateway"}), (200, {})])
    gateway.answers["/start_weight_update"] = lambda _: next(answers)
    client.update_model_params(model())
    assert gateway.calls.count("/init_weight_transfer_engine") == 2
    assert client.weight_version == 7
    client.close_communicator()


def test_a_server_without_weight_transfer_is_named(gateway: PlayedGateway) -> None:
    gateway.answers["/server_info"] = lambda _: (200, {"vllm_config": {"weight_transfer_config": None}})
    with pytest.raises(RuntimeError, match="has no weight transfer: start"):
        client_of(gateway).init_communicator("cpu")


def test_install_does_nothing_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = vllm_generation.VLLMClient, vllm_client.packed_nccl_broadcast_producer
    gloo_trl.install()
    assert (vllm_generation.VLLMClient, vllm_client.packed_nccl_broadcast_producer) == before
