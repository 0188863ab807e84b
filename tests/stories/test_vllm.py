"""vLLM: rollouts, a weight update, a replica that is killed, and the rollouts after it, of two real replicas."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("vllm")

from examples.tiny_model import task
from tests.rigs.engines.real_trainer import answers, checkpoint, learn, prompts
from tests.rigs.engines.real_vllm import RealFleet, fleet
from trainer_client import BlockingRolloutClient, SamplingParams, WeightSender

pytestmark = [pytest.mark.story, pytest.mark.vllm]

GREEDY = SamplingParams(temperature=0.0, max_tokens=task.MAX_ANSWER_TOKENS)


def test_rollouts_follow_the_weights_that_were_pushed_last(tmp_path: Path) -> None:
    with fleet(task.COMMITTED, tmp_path) as real, BlockingRolloutClient(real.url) as client:
        client.wait_ready()
        assert_rollouts_are(answers(checkpoint(), tmp_path / "checkpoint"), client, version=0)

        trained = learn(checkpoint(), seed=7)
        expected = answers(trained, tmp_path / "trained")
        with WeightSender(client) as sender:
            assert sender.push(trained) == 1
        assert_rollouts_are(expected, client, version=1)

        real.kill(0)
        assert_rollouts_are(expected, client, version=1)
        real.restart(0)
        real.until_serving(version=1)
        assert_rollouts_are(expected, client, version=1)
        assert_both_take_rollouts(real)


def assert_rollouts_are(expected: list[list[int]], client: BlockingRolloutClient, version: int) -> None:
    """Token for token what transformers says, and of this weight version."""
    rollouts = client.generate(prompts(), GREEDY).gather()
    completions = [completion for rollout in rollouts for completion in rollout.completions]
    assert {completion.oldest_version for completion in completions} == {version}
    assert [completion.token_ids.tolist() for completion in completions] == expected


def assert_both_take_rollouts(real: RealFleet) -> None:
    assert all(replica["samples_placed"] for replica in real.call("/status")[1]["replicas"])
