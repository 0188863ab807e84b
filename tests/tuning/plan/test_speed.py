"""The speed model: what it says of rows that were measured, and what must hold whatever its constants are."""

import dataclasses

import pytest

from loadtests.shapes import SHAPES
from tuning.plan.gpu import GPUS
from tuning.plan.shape import shape_of
from tuning.plan.speed import EngineModel, fitted, rollout
from tuning.plan.workload import Lengths, StepWorkload

ENGINE = EngineModel(
    shape=shape_of(SHAPES["qwen2-7b"], "qwen2-7b"),
    gpu=GPUS["H200"],
    tensor_parallel=1,
    max_num_seqs=512,
    kv_tokens=2e6,
    speeds=fitted(),
)
WORK = StepWorkload(prompts=64, samples=8, prompt=Lengths(256, 256), response=Lengths(256, 256))


def test_samples_of_a_group_read_their_prompt_once() -> None:
    alone = dataclasses.replace(WORK, prompts=512, samples=1)
    assert rollout(ENGINE, alone).prefill_s == pytest.approx(8 * rollout(ENGINE, WORK).prefill_s)


def test_what_the_kv_cache_does_not_hold_waits() -> None:
    small = dataclasses.replace(ENGINE, kv_tokens=100 * (256 + 256))
    found = rollout(small, WORK)
    assert found.most_running == 100
    assert found.tokens_per_s < rollout(ENGINE, WORK).tokens_per_s


def test_long_completions_cost_by_the_longest_of_them() -> None:
    mixed = dataclasses.replace(WORK, response=Lengths(256, 2048))
    assert rollout(ENGINE, mixed).tokens == pytest.approx(rollout(ENGINE, WORK).tokens, rel=0.05)
    assert rollout(ENGINE, mixed).seconds > 1.5 * rollout(ENGINE, WORK).seconds


@pytest.mark.parametrize(("mean", "longest"), [(100, 100), (600, 4096), (3500, 4096), (50, 32768)])
def test_lengths_have_the_mean_and_the_longest_that_were_asked_for(mean: int, longest: int) -> None:
    lengths = Lengths(mean, longest).quantiles(20_000)
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.01)
    assert max(lengths) <= longest
    at_longest = sum(length == longest for length in lengths) / len(lengths)
    assert at_longest == pytest.approx(Lengths(mean, longest).cut, abs=0.001)
