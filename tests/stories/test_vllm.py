"""vLLM: rollouts, a weight update, a replica that is killed, and the rollouts after it, of two real replicas."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_model import task
from tests.rigs.engines.real_vllm import RealFleet, fleet
from trainer_client import BlockingRolloutClient, Rollout, SamplingParams, WeightSender

pytestmark = [pytest.mark.story, pytest.mark.vllm]

PROBLEMS = task.some_problems(8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=task.MAX_ANSWER_TOKENS)


def test_rollouts_follow_the_weights_that_were_pushed_last(tmp_path: Path) -> None:
    with fleet(task.COMMITTED, tmp_path) as real, BlockingRolloutClient(real.url) as client:
        client.wait_ready()
        assert_rollouts_are_of(task.COMMITTED, client, version=0)

        trained = trained_model(tmp_path / "trained")
        with WeightSender(client) as sender:
            assert sender.push(AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32)) == 1
        assert_rollouts_are_of(trained, client, version=1)

        real.kill(0)
        assert_rollouts_are_of(trained, client, version=1)
        real.restart(0)
        real.until_serving(version=1)
        assert_both_take_rollouts(real, client)
        assert_rollouts_are_of(trained, client, version=1)


def trained_model(folder: Path) -> Path:
    """The tiny model after a step that changes what it says."""
    model: Any = AutoModelForCausalLM.from_pretrained(task.COMMITTED, dtype=torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(task.COMMITTED).save_pretrained(folder)
    return folder


def rollouts(client: BlockingRolloutClient) -> list[Rollout]:
    tokenizer = AutoTokenizer.from_pretrained(task.COMMITTED)
    return client.generate([task.prompt_token_ids(tokenizer, problem) for problem in PROBLEMS], GREEDY).gather()


def assert_rollouts_are_of(model: Path, client: BlockingRolloutClient, version: int) -> None:
    """Token for token what transformers says of `model`, and of this weight version."""
    completions = [completion for rollout in rollouts(client) for completion in rollout.completions]
    assert {completion.oldest_version for completion in completions} == {version}
    expected = task.greedy_token_ids(str(model), PROBLEMS)
    assert [completion.token_ids.tolist() for completion in completions] == expected


def assert_both_take_rollouts(real: RealFleet, client: BlockingRolloutClient) -> None:
    rollouts(client)
    assert all(replica["samples_placed"] for replica in real.call("/status")[1]["replicas"])
