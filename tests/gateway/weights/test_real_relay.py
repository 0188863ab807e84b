"""TRL's client and the relay before two real vLLM replicas: kill -9, a trainer that dies, and the one after it."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation import vllm_client

from engines.process.port import free_port
from examples.tiny_model import task
from tests.rigs.engines.real_vllm import RealFleet, fleet, greedy_token_ids, until_receiving
from trainer_client import trl as gloo_trl

pytestmark = pytest.mark.vllm

TIMEOUT_S = 60.0
NUM_PROBLEMS = 8


@dataclass
class Trained:
    """A fleet and a trainer in a group with its relay."""

    real: RealFleet
    client: gloo_trl.GlooVLLMClient
    model: Any
    folder: Path

    def learn(self, seed: int) -> None:
        """Other weights than any before."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)

    def expected(self) -> list[list[int]]:
        """The answer of transformers with the trainer's weights."""
        self.model.save_pretrained(self.folder)
        AutoTokenizer.from_pretrained(task.COMMITTED).save_pretrained(self.folder)
        return task.greedy_token_ids(str(self.folder), problems())

    def said_by(self, index: int) -> list[list[int]]:
        tokenizer = AutoTokenizer.from_pretrained(task.COMMITTED)
        prompts = [task.prompt_token_ids(tokenizer, problem) for problem in problems()]
        return greedy_token_ids(self.real.replicas[index].url, prompts, task.MAX_ANSWER_TOKENS)


def problems() -> list[Any]:
    return list(islice(task.problems(seed=9), NUM_PROBLEMS))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("trained")
    model = AutoModelForCausalLM.from_pretrained(task.COMMITTED, dtype=torch.float32)
    with fleet(task.COMMITTED, folder) as real, pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_client, "packed_nccl_broadcast_producer", gloo_trl.send_packed)
        client = gloo_trl.GlooVLLMClient(real.url, group_port=free_port(), timeout_s=TIMEOUT_S)
        client.init_communicator("cpu")
        yield Trained(real, client, model, folder / "model")
        client.close_communicator()


def test_the_group_of_trls_client_is_itself_and_the_relay(trained: Trained) -> None:
    assert trained.real.call("/get_world_size") == (200, {"world_size": 1})
    assert trained.real.call("/status")[1]["weight_relay"]["in_group"]
    assert trained.client.communicator is not None
    assert trained.client.communicator.world_size == 2


def test_both_replicas_hold_what_trls_client_sent(trained: Trained) -> None:
    before = trained.expected()
    trained.learn(seed=1)
    began = time.monotonic()
    trained.client.update_model_params(trained.model)
    print(f"synced in {time.monotonic() - began:.2f} s")
    print(trained.real.call("/v1/weight_updates")[1]["weight_updates"][0]["seconds"])
    assert trained.client.weight_version == 1
    expected = trained.expected()
    assert expected != before
    assert trained.said_by(0) == trained.said_by(1) == expected


@pytest.mark.parametrize("moment", ["transfer", "load"])
def test_a_replica_killed_in_an_update_does_not_touch_the_trainer(trained: Trained, moment: str) -> None:
    version = trained.client.weight_version or 0
    trained.learn(seed=2)
    wanted = {"transfer": "RECEIVING", "load": "UPDATING"}[moment]

    def kill_in_time() -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            status = trained.real.call("/status")[1]
            phase = (status["weight_update"] or {}).get("phase")
            if wanted in (phase, status["replicas"][0]["state"]):
                trained.real.kill(0)
                return
            time.sleep(0.002)

    killer = threading.Thread(target=kill_in_time)
    killer.start()
    trained.client.update_model_params(trained.model)
    killer.join(TIMEOUT_S)
    assert trained.client.weight_version == version + 1
    assert trained.said_by(1) == trained.expected()
    trained.real.restart(0)
    trained.real.until_serving(version + 1)
    assert trained.said_by(0) == trained.expected()


def test_a_replica_that_is_dead_before_an_update_is_done_without(trained: Trained) -> None:
    version = trained.client.weight_version or 0
    trained.real.kill(1)
    trained.learn(seed=3)
    trained.client.update_model_params(trained.model)
    assert trained.client.weight_version == version + 1
    assert trained.said_by(0) == trained.expected()
    trained.real.restart(1)
    trained.real.until_serving(version + 1)
    assert trained.said_by(1) == trained.expected()


def test_a_trainer_that_dies_in_the_transfer_leaves_a_fleet_for_the_next(trained: Trained) -> None:
    version, said = trained.client.weight_version or 0, trained.said_by(0)
    named = list(trained.model.named_parameters())
    info = {
        "names": [name for name, _ in named],
        "dtype_names": ["float32"] * len(named),
        "shapes": [list(tensor.shape) for _, tensor in named],
    }
    assert trained.real.call("/start_weight_update", {})[0] == 200
    with ThreadPoolExecutor(1) as beside:
        answer = beside.submit(trained.real.call, "/update_weights", {"update_info": info})
        until_receiving(trained.real)
        trained.client.close_communicator()
        status, reply = answer.result(TIMEOUT_S)
    assert status == 424, reply
    trained.real.until_serving(version)
    assert trained.said_by(0) == trained.said_by(1) == said
    trained.client.init_communicator("cpu")
    trained.learn(seed=4)
    trained.client.update_model_params(trained.model)
    assert trained.client.weight_version == version + 1
    assert trained.said_by(0) == trained.said_by(1) == trained.expected()
