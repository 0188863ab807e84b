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


def test_a_decode_step_takes_no_less_than_its_weights_need_from_memory() -> None:
    assert ENGINE.step_s(1, 300) > ENGINE.shape.read_bytes(1) / (ENGINE.gpu.tb_per_s * 1e12)


def test_a_step_without_a_cuda_graph_takes_the_cpu_longer_where_the_gpu_does_not() -> None:
    """More sequences than have a graph, or an eager engine."""
    small = dataclasses.replace(ENGINE, shape=shape_of(SHAPES["qwen2-0.5b"], "qwen2-0.5b"))
    eager = dataclasses.replace(small, graph_seqs=0)
    assert small.step_s(513, 1000) > small.step_s(512, 1000) + 0.5 * small.shape.layers * small.speeds.eager_layer_s
    assert eager.step_s(64, 1000) > 2 * small.step_s(64, 1000)
    assert eager.step_s(513, 1000) == small.step_s(513, 1000)


def test_samples_of_a_group_read_their_prompt_once() -> None:
    alone = dataclasses.replace(WORK, prompts=512, samples=1)
    assert rollout(ENGINE, alone).prefill_s == pytest.approx(8 * rollout(ENGINE, WORK).prefill_s)


def test_fewer_sequences_at_a_time_are_slower() -> None:
    speeds = [rollout(dataclasses.replace(ENGINE, max_num_seqs=seqs), WORK).tokens_per_s for seqs in (16, 64, 256, 512)]
    assert speeds == sorted(speeds)


def test_what_the_kv_cache_does_not_hold_waits() -> None:
    small = dataclasses.replace(ENGINE, kv_tokens=100 * (256 + 256))
    found = rollout(small, WORK)
    assert found.most_running == 100
    assert found.tokens_per_s < rollout(ENGINE, WORK).tokens_per_s


def test_long_completions_cost_by_the_longest_of_them() -> None:
    mixed = dataclasses.replace(WORK, response=Lengths(256, 2048))
    assert rollout(ENGINE, mixed).tokens == pytest.approx(rollout(ENGINE, WORK).tokens, rel=0.05)
    assert rollout(ENGINE, mixed).seconds > 1.5 * rollout(ENGINE, WORK).seconds


def test_an_api_process_bounds_an_engine_that_could_do_more() -> None:
    small = dataclasses.replace(ENGINE, shape=shape_of(SHAPES["qwen2-0.5b"], "qwen2-0.5b"))
    more = dataclasses.replace(small, api_servers=4)
    assert rollout(more, WORK).tokens_per_s > 1.3 * rollout(small, WORK).tokens_per_s


@pytest.mark.parametrize(("mean", "longest"), [(100, 100), (600, 4096), (3500, 4096), (50, 32768)])
def test_lengths_have_the_mean_and_the_longest_that_were_asked_for(mean: int, longest: int) -> None:
    lengths = Lengths(mean, longest).quantiles(20_000)
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.01)
    assert max(lengths) <= longest
    at_longest = sum(length == longest for length in lengths) / len(lengths)
    assert at_longest == pytest.approx(Lengths(mean, longest).cut, abs=0.001)
