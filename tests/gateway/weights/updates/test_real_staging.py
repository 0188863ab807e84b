"""A real vLLM on CPU stages an update of TRL's client: it makes tokens meanwhile, and takes the same weights."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

from trl.generation import vllm_client

from engines.errors import WeightUpdateFailed
from examples.tiny_model import task
from tests.rigs.engines import real_trainer
from tests.rigs.engines.real_trainer import TIMEOUT_S, RealTrainer
from tests.rigs.engines.real_vllm import fleet, gathered, standing_amid, until_receiving
from trainer_client import BlockingRolloutClient, WeightSender
from trainer_client import trl as gloo_trl

pytestmark = pytest.mark.vllm


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


class Trained(RealTrainer):
    """A vLLM behind a gateway, and TRL's client before it."""

    def said(self) -> list[list[int]]:
        return self.said_by(0)

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
def trained(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trained]:
    weights = getattr(request, "param", {})
    with (
        fleet(task.COMMITTED, tmp_path, num_replicas=1, weights=weights) as real,
        real_trainer.trl_client(real.url) as client,
    ):
        yield Trained(real, client, real_trainer.checkpoint(), tmp_path / "model")


@pytest.fixture
def send(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> HeldSend:
    send = HeldSend()
    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", send)
    return send


@pytest.mark.parametrize(
    ("trained", "staged"), [({"stage": "auto"}, True), ({"stage": "never"}, False)], indirect=["trained"]
)
def test_an_engine_takes_the_trainers_weights_staged_or_not(trained: Trained, staged: bool) -> None:
    before = trained.said()
    for seed in (1, 2):
        trained.learn(seed)
        trained.client.update_model_params(trained.model)
    assert trained.last()["staged"] is staged
    assert trained.said() == trained.expected() != before


def test_rollouts_go_on_until_the_swap_and_carry_both_versions(trained: Trained, send: HeldSend) -> None:
    trained.learn(1)
    send.may_send.clear()
    prompt = real_trainer.prompts()[:1] * 4
    body = {"model": str(task.COMMITTED), "prompt": prompt, "max_tokens": 450, "ignore_eos": True}
    with ThreadPoolExecutor(2) as beside:
        syncing = beside.submit(trained.client.update_model_params, trained.model)
        until_receiving(trained.real)
        with gathered(trained.real, 4):
            rolling = beside.submit(trained.real.call, "/v1/completions", body)
        with standing_amid(trained.real):
            assert trained.real.call("/status")[1]["gate_closed_for"] == []
            send.may_send.set()
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
        assert trained.last()["staged"]
        assert (trained.said(), trained.checksums()) == (before, checksums)


def test_a_trainer_that_dies_in_its_broadcast_leaves_the_weights_as_they_were(trained: Trained, send: HeldSend) -> None:
    trained.learn(1)
    before = trained.checksums()
    send.may_send.clear()
    send.dies = True
    with ThreadPoolExecutor(1) as beside:
        syncing = beside.submit(trained.client.update_model_params, trained.model)
        until_receiving(trained.real)
        send.may_send.set()
        with pytest.raises(MemoryError):
            syncing.result()
    trained.real.until_serving(0)
    assert trained.checksums() == before
    send.dies = False
    trained.client.init_communicator("cpu")
    trained.client.update_model_params(trained.model)
    assert trained.last()["end"] == "committed"
    assert trained.checksums() != before
