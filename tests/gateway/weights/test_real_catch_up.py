"""Versions that survive on two real vLLM replicas in one group: kill -9, a trainer that dies, what is served then."""

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
from trainer_client import BlockingRolloutClient, WeightSender
from trainer_client import trl as gloo_trl

pytestmark = pytest.mark.vllm

TIMEOUT_S = 60.0


@dataclass
class Trained:
    """A fleet that was brought to version 1, by a trainer that may update it again, and what version 1 says."""

    real: RealFleet
    client: gloo_trl.GlooVLLMClient
    model: Any
    prompts: list[list[int]]
    expected: list[list[int]]

    def all_say_version_1(self) -> bool:
        return all(
            greedy_token_ids(info.url, self.prompts, task.MAX_ANSWER_TOKENS) == self.expected
            for info in self.real.replicas
        )

    def update(self) -> None:
        self.client.init_communicator("cpu")
        self.client.update_model_params(self.model)
        self.client.reset_prefix_cache()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("trained")
    model = AutoModelForCausalLM.from_pretrained(task.COMMITTED, dtype=torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder / "version-1")
    tokenizer = AutoTokenizer.from_pretrained(task.COMMITTED)
    tokenizer.save_pretrained(folder / "version-1")
    asked = list(islice(task.problems(seed=9), 8))
    prompts = [task.prompt_token_ids(tokenizer, problem) for problem in asked]
    expected = task.greedy_token_ids(str(folder / "version-1"), asked)
    assert expected != task.greedy_token_ids(str(task.COMMITTED), asked)
    flat = {"relay": "never"}
    with fleet(task.COMMITTED, folder, weights=flat) as real, pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_client, "packed_nccl_broadcast_producer", gloo_trl.send_packed)
        client = gloo_trl.GlooVLLMClient(real.url, group_port=free_port(), timeout_s=TIMEOUT_S)
        one = Trained(real, client, model, prompts, expected)
        one.update()
        assert client.weight_version == 1
        yield one
        client.close_communicator()


def announced(model: Any) -> dict[str, Any]:
    named = list(model.named_parameters())
    return {
        "names": [name for name, _ in named],
        "dtype_names": ["float32"] * len(named),
        "shapes": [list(tensor.shape) for _, tensor in named],
    }


def test_the_successor_of_a_killed_replica_serves_the_current_version(trained: Trained) -> None:
    assert trained.all_say_version_1()
    trained.real.kill(0)
    trained.real.restart(0)
    began = time.monotonic()
    status = trained.real.until_serving()
    print(f"caught up {time.monotonic() - began:.2f} s after its engine was ready")
    assert [replica["weight_version"] for replica in status["replicas"]] == [1, 1]
    assert status["weight_store"]["versions"] == [1]
    assert trained.all_say_version_1()


def test_a_trainer_that_dies_in_the_transfer_leaves_the_version_before(trained: Trained) -> None:
    trained.client.init_communicator("cpu")
    assert trained.real.call("/start_weight_update", {})[0] == 200
    with ThreadPoolExecutor(1) as beside:
        answer = beside.submit(trained.real.call, "/update_weights", {"update_info": announced(trained.model)})
        until_receiving(trained.real)
        trained.client.close_communicator()
        status, reply = answer.result(TIMEOUT_S)
    assert status == 424, reply
    began = time.monotonic()
    trained.real.until_serving()
    print(f"the version before serves {time.monotonic() - began:.2f} s after the error")
    assert trained.all_say_version_1()


def test_a_replica_killed_in_the_transfer_is_named_and_its_peer_serves_on(
    trained: Trained,
) -> None:
    trained.client.init_communicator("cpu")
    assert trained.real.call("/start_weight_update", {})[0] == 200
    with ThreadPoolExecutor(1) as beside:
        answer = beside.submit(trained.real.call, "/update_weights", {"update_info": announced(trained.model)})
        until_receiving(trained.real)
        trained.real.kill(1)
        status, reply = answer.result(TIMEOUT_S)
        assert status == 424, reply
        assert trained.real.replicas[1].replica_id in reply["error"]["message"]
        trained.client.close_communicator()  # as TRL's client does when the call fails
    trained.real.restart(1)
    trained.real.until_serving()
    assert trained.all_say_version_1()


def test_the_next_trainer_finds_a_whole_fleet(trained: Trained) -> None:
    trained.update()
    status = trained.real.until_serving()
    assert status["weight_version"] == 2
    assert trained.all_say_version_1()  # the same weights under the next number


def test_a_version_pushed_through_the_store_reaches_a_successor_too(trained: Trained, tmp_path: Path) -> None:
    torch.manual_seed(11)
    named = [(name, tensor + 0.05 * torch.randn_like(tensor)) for name, tensor in trained.model.state_dict().items()]
    trained.model.load_state_dict(dict(named))
    began = time.monotonic()
    with BlockingRolloutClient(trained.real.url) as rollouts, WeightSender(rollouts, transport="store") as sender:
        assert sender.push(trained.model) == 3
    print(f"pushed in {time.monotonic() - began:.2f} s")
    trained.model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(task.COMMITTED).save_pretrained(tmp_path)
    expected = task.greedy_token_ids(str(tmp_path), list(islice(task.problems(seed=9), 8)))
    assert expected != trained.expected
    for info in trained.real.replicas:
        assert greedy_token_ids(info.url, trained.prompts, task.MAX_ANSWER_TOKENS) == expected
    trained.real.kill(0)
    trained.real.restart(0)
    trained.real.until_serving()
    assert greedy_token_ids(trained.real.replicas[0].url, trained.prompts, task.MAX_ANSWER_TOKENS) == expected
