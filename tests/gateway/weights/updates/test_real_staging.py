"""A real vLLM on CPU stages an update of TRL's client: it makes tokens meanwhile, and takes the same weights."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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

from engines.errors import WeightUpdateFailed
from engines.process.port import free_port
from examples.tiny_model import task
from tests.rigs.engines.real_vllm import RealFleet, fleet, gathered, greedy_token_ids, standing_amid, until_receiving
from trainer_client import BlockingRolloutClient, WeightSender
from trainer_client import trl as gloo_trl

pytestmark = pytest.mark.vllm

TIMEOUT_S = 60.0
PROBLEMS = list(islice(task.problems(seed=9), 8))


class HeldSend:
    """The trainer's broadcast, which a test holds up."""

    def __init__(self) -> None:
        self.may_send = threading.Event()
        self.may_send.set()
        self.dies = False

    def __call__(self, iterator: Any, group: Any, src: int, post_iter_func: Any) -> None:
        assert self.may_send.wait(TIMEOUT_S)
        if self.dies:
            group.close("the trainer is out of memory")
            raise MemoryError
        gloo_trl.send_packed(iterator, group, src, post_iter_func)


class Trained:
    """A vLLM behind a gateway, and TRL's client before it."""

    def __init__(self, real: RealFleet, send: HeldSend) -> None:
        self.real = real
        self.send = send
        self.model: Any = AutoModelForCausalLM.from_pretrained(task.COMMITTED, dtype=torch.float32)
        self.client = gloo_trl.GlooVLLMClient(real.url, group_port=free_port(), timeout_s=TIMEOUT_S)
        self.client.init_communicator("cpu")

    def learn(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)

    def said(self) -> list[list[int]]:
        tokenizer = AutoTokenizer.from_pretrained(task.COMMITTED)
        prompts = [task.prompt_token_ids(tokenizer, problem) for problem in PROBLEMS]
        return greedy_token_ids(self.real.replicas[0].url, prompts, task.MAX_ANSWER_TOKENS)

    def checksums(self) -> Any:
        """Checksums of the engine's own parameters."""
        body = json.dumps({"action": "checksum"}).encode()
        url = f"{self.real.replicas[0].url}/weight_checker"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return json.load(reply)

    def last(self) -> dict[str, Any]:
        report: dict[str, Any] = self.real.call("/v1/weight_updates")[1]["weight_updates"][0]
        return report


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> HeldSend:
    send = HeldSend()
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", send)
    return send


@pytest.fixture
def trained(tmp_path: Path, send: HeldSend, request: pytest.FixtureRequest) -> Iterator[Trained]:
    weights = getattr(request, "param", {})
    with fleet(task.COMMITTED, tmp_path, num_replicas=1, weights=weights) as real:
        trained = Trained(real, send)
        yield trained
        trained.client.close_communicator()


@pytest.mark.parametrize(
    ("trained", "staged"), [({"stage": "auto"}, True), ({"stage": "never"}, False)], indirect=["trained"]
)
def test_an_engine_takes_the_trainers_weights_staged_or_not(trained: Trained, staged: bool, tmp_path: Path) -> None:
    before = trained.said()
    for seed in (1, 2):
        trained.learn(seed)
        trained.client.update_model_params(trained.model)
    assert trained.last()["staged"] is staged
    trained.model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(task.COMMITTED).save_pretrained(tmp_path / "model")
    assert trained.said() == task.greedy_token_ids(str(tmp_path / "model"), PROBLEMS) != before


def test_rollouts_go_on_until_the_swap_and_carry_both_versions(trained: Trained) -> None:
    trained.learn(1)
    trained.send.may_send.clear()
    prompt = task.prompt_token_ids(AutoTokenizer.from_pretrained(task.COMMITTED), PROBLEMS[0])
    body = {"model": str(task.COMMITTED), "prompt": [prompt] * 4, "max_tokens": 450, "ignore_eos": True}
    with ThreadPoolExecutor(2) as beside:
        syncing = beside.submit(trained.client.update_model_params, trained.model)
        until_receiving(trained.real)
        with gathered(trained.real, 4):
            rolling = beside.submit(trained.real.call, "/v1/completions", body)
        with standing_amid(trained.real):
            assert trained.real.call("/status")[1]["gate_closed_for"] == []
            trained.send.may_send.set()
            syncing.result()
        status, reply = rolling.result()
    assert status == 200
    assert trained.last()["staged"]
    print(trained.last()["seconds"], trained.last()["stopped_s"])
    for choice in reply["choices"]:
        assert [span["version"] for span in choice["weight_versions"]] == [0, 1]


def test_packed_weights_that_the_canary_refuses_come_back_from_the_store(trained: Trained) -> None:
    """vLLM on CPU computes with other tensors than it loads: there is nothing to exchange."""
    with BlockingRolloutClient(trained.real.url) as client, WeightSender(client, timeout_s=TIMEOUT_S) as sender:
        count = len(client.canary_token_ids()) - 1
        sender.push(trained.model, canary_logprobs=[-1.0] * count)  # the distance that is usual
        before, checksums = trained.said(), trained.checksums()
        trained.learn(1)
        with pytest.raises(WeightUpdateFailed, match="canary"):
            sender.push(trained.model, canary_logprobs=[-1000.0] * count)
        trained.real.until_serving(1)
        record = trained.last()
        print(record["seconds"], record["replicas"])
        (replica,) = record["replicas"].values()
        assert (record["staged"], replica["taken_back"]["source"]) == (True, "store")
        assert (trained.said(), trained.checksums()) == (before, checksums)


def test_a_trainer_that_dies_in_its_broadcast_leaves_the_weights_as_they_were(trained: Trained) -> None:
    trained.learn(1)
    before = trained.checksums()
    trained.send.may_send.clear()
    trained.send.dies = True
    with ThreadPoolExecutor(1) as beside:
        syncing = beside.submit(trained.client.update_model_params, trained.model)
        until_receiving(trained.real)
        trained.send.may_send.set()
        with pytest.raises(MemoryError):
            syncing.result()
    trained.real.until_serving(0)
    assert trained.checksums() == before
    trained.send.dies = False
    trained.client.init_communicator("cpu")
    trained.client.update_model_params(trained.model)
    assert trained.last()["end"] == "committed"
    assert trained.checksums() != before
