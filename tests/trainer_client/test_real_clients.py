"""Client and sender against two real vLLM replicas behind the gateway: values, refusals, and a replica that dies."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines.errors import InvalidRequest
from examples.tiny_model import task
from tests.rigs.engines.real_vllm import RealFleet, fleet
from trainer_client import BlockingRolloutClient, Rollout, SamplingParams, WeightSender

pytestmark = pytest.mark.vllm

PROBLEMS = ["52", "901", "7364", "20418"]
SAMPLING = SamplingParams(n=4, max_tokens=task.MAX_ANSWER_TOKENS)
CLOSE = 1e-4
SOON_S = 60.0


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with fleet(task.COMMITTED, tmp_path_factory.mktemp("engines")) as running:
        yield running


@pytest.fixture
def client(real: RealFleet) -> Iterator[BlockingRolloutClient]:
    with BlockingRolloutClient(real.url) as client:
        client.wait_ready(SOON_S)
        yield client


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(task.COMMITTED, dtype=torch.float32).eval()


def drawn(client: BlockingRolloutClient) -> list[Rollout]:
    tokenizer = AutoTokenizer.from_pretrained(task.COMMITTED)
    return client.generate([task.prompt_token_ids(tokenizer, problem) for problem in PROBLEMS], SAMPLING).gather()


def furthest_logprob(model: Any, rollouts: list[Rollout]) -> float:
    """The largest distance between log-probs of the engine and of transformers over all drawn tokens."""
    furthest = 0.0
    for rollout in rollouts:
        assert rollout.prompt_token_ids is not None
        for completion in rollout.completions:
            ids = torch.from_numpy(np.concatenate([rollout.prompt_token_ids, completion.token_ids]).astype(np.int64))
            with torch.no_grad():
                scores = model(ids[None]).logits[0].log_softmax(-1)
            start = len(rollout.prompt_token_ids)
            own = scores[torch.arange(start - 1, len(ids) - 1), ids[start:]]
            assert completion.logprobs is not None
            furthest = max(furthest, float(np.abs(own.numpy() - completion.logprobs).max()))
    return furthest


def test_recorded_logprobs_are_the_models_before_and_after_a_push(client: BlockingRolloutClient, model: Any) -> None:
    assert furthest_logprob(model, drawn(client)) < CLOSE
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    with WeightSender(client, timeout_s=SOON_S) as sender:
        version = sender.push(model)
    rollouts = drawn(client)
    assert {completion.oldest_version for rollout in rollouts for completion in rollout.completions} == {version}
    assert furthest_logprob(model, rollouts) < CLOSE


def test_a_push_of_another_models_tensors_is_refused_and_the_next_one_taken(
    client: BlockingRolloutClient, model: Any
) -> None:
    served = client.weight_version()
    with WeightSender(client, timeout_s=SOON_S) as sender:
        with pytest.raises(InvalidRequest, match=r"named_tensors has 'other\.weight', which the served"):
            sender.push([("other.weight", torch.zeros(2))])
        assert client.weight_version() == served
        assert sender.push(model, version=served + 1) == served + 1
    assert furthest_logprob(model, drawn(client)) < CLOSE


def test_a_push_after_a_replica_has_died_reaches_those_that_live(
    real: RealFleet, client: BlockingRolloutClient, model: Any
) -> None:
    with WeightSender(client, timeout_s=SOON_S) as sender:
        version = sender.push(model)
        os.kill(real.replicas[1].pid, signal.SIGKILL)
        deadline = time.monotonic() + SOON_S
        while states(client).get("engine-1") not in ("LOST", None) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert sender.push(model) == version + 1
    assert states(client)["engine-0"] == "SERVING"
    assert furthest_logprob(model, drawn(client)) < CLOSE


def states(client: BlockingRolloutClient) -> dict[str, str]:
    return {replica["replica_id"]: replica["state"] for replica in client.status()["replicas"]}
