"""Which ways to deal GPUs out are offered, in which order, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ConfigError
from gateway.config.load import load
from loadtests.shapes import SHAPES, write_model
from tuning.plan.choices import Choice, ranked
from tuning.plan.gpu import GPUS, gpu_of
from tuning.plan.layout import layouts
from tuning.plan.question import Question
from tuning.plan.report import configuration
from tuning.plan.shape import shape_of
from tuning.plan.speed import fitted
from tuning.plan.workload import Lengths, StepWorkload

QUESTION = Question(
    shape=shape_of(SHAPES["qwen2-7b"], "qwen2-7b"),
    gpu=GPUS["H200"],
    gpus=8,
    work=StepWorkload(prompts=128, samples=8, prompt=Lengths(512, 1024), response=Lengths(1024, 4096)),
    speeds=fitted(),
)


@pytest.fixture(scope="module")
def found() -> list[Choice]:
    """Every choice for QUESTION, which takes a third of a second to work out."""
    return ranked(QUESTION)


def test_the_shortest_step_comes_first_among_those_with_even_shares(found: list[Choice]) -> None:
    even = [choice.step_s for choice in found if choice.is_even]
    assert even[0] <= 1.06 * min(even)
    assert [choice.is_even for choice in found] == sorted((choice.is_even for choice in found), reverse=True)


def test_among_equal_steps_the_choice_without_tensor_parallelism_comes_first(
    found: list[Choice],
) -> None:
    one, two = found[0], min(found, key=lambda choice: (not choice.is_even, choice.step_s))
    assert two.layout.tensor_parallel == 2
    assert two.step_s < one.step_s < 1.05 * two.step_s
    assert one.layout.tensor_parallel == 1


def test_trl_is_told_numbers_that_make_the_batch(found: list[Choice]) -> None:
    work = QUESTION.work
    for choice in found:
        assert choice.layout.trainer_gpus + choice.layout.replicas * choice.layout.tensor_parallel <= 8
        if choice.trl:
            made = choice.trl.per_device_train_batch_size * choice.layout.trainer_gpus * choice.trl.steps_per_generation
            assert made == work.prompts * work.samples
        else:
            assert (work.prompts * work.samples) % choice.layout.trainer_gpus


def test_a_model_that_needs_two_gpus_gets_no_replica_of_one() -> None:
    config = {**SHAPES["qwen2-7b"], "num_hidden_layers": 112}  # about 29 billion parameters, 53 GiB
    large = dataclasses.replace(
        QUESTION, shape=shape_of(config, "large"), gpu=gpu_of("H100,memory_gib=48"), trainer_gpus=0
    )
    assert {choice.layout.tensor_parallel for choice in ranked(large)} == {2, 4}  # 28 heads are not dealt out to 8


def test_what_fits_nowhere_is_refused_with_the_reason() -> None:
    small = dataclasses.replace(QUESTION, gpu=gpu_of("L4,memory_gib=6"), gpus=2)
    with pytest.raises(ConfigError, match=r"--gpus 2: training all of 7\.6 billion parameters fits no split of 2 x L4"):
        ranked(small)
    with pytest.raises(ConfigError, match=r"14 GiB of weights and the KV cache of 5120 tokens fit no engine on 1 x L4"):
        ranked(dataclasses.replace(small, gpus=1, gpu=gpu_of("L4,memory_gib=12"), trainer_gpus=0))
    long = dataclasses.replace(QUESTION.work, response=Lengths(1000, 40_000))
    with pytest.raises(ConfigError, match="1000000 completions of a step, and at most 200000 are planned"):
        dataclasses.replace(QUESTION.work, prompts=125_000)
    with pytest.raises(ConfigError, match="41024 tokens at their longest, and qwen2-7b has 32768 positions"):
        ranked(dataclasses.replace(QUESTION, work=long))


def test_the_configuration_is_one_that_up_takes(found: list[Choice], tmp_path: Path) -> None:
    write_model("qwen2-7b", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    best = found[0]
    (tmp_path / "plan.yaml").write_text(configuration(QUESTION, best, str(tmp_path / "model")))
    engine = load(tmp_path / "plan.yaml", environ={}).engine
    assert (engine.num_replicas, engine.tensor_parallel_size) == (best.layout.replicas, best.layout.tensor_parallel)
    assert engine.max_model_len == 5120


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("X100", "unknown; it can be A100-40, "),
        ("H200,memory=3", "expected one of memory_gib="),
        ("H200,tflops=fast", "'fast' is no positive number"),
        ("H200,tb_per_s=nan", "'nan' is no positive number"),
        ("memory_gib=10", "tb_per_s, tflops, link_gb_per_s missing"),
    ],
)
def test_a_gpu_that_is_not_known_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpu_of(text)


def test_a_colocated_trainer_has_all_gpus_and_leaves_room_for_engines() -> None:
    found = ranked(dataclasses.replace(QUESTION, is_colocated=True))
    assert {choice.layout.trainer_gpus for choice in found} == {8}
    assert all(choice.layout.replicas * choice.layout.gpus_of_replica <= 8 for choice in found)
    parked = {choice.layout.is_parked: choice.memory.share for choice in found if choice.layout.tensor_parallel == 1}
    assert parked[True] == 0.9
    assert parked[False] == pytest.approx(0.9 - 16 * 7.6e9 / 8 / 2**30 / 140.4, abs=0.01)


def test_nodes_add_gpus_and_no_replica_is_on_two() -> None:
    found = ranked(dataclasses.replace(QUESTION, nodes=2, trainer_gpus=8))
    assert {choice.layout.tensor_parallel: choice.layout.replicas for choice in found}[4] == 2
    assert not any(choice.layout.spans_nodes(8) for choice in found)
    assert found[0].step_s < ranked(QUESTION)[0].step_s


def test_adapters_are_sent_and_served_alone() -> None:
    full, lora = (ranked(dataclasses.replace(QUESTION, lora_rank=rank))[0] for rank in (0, 20))
    assert lora.sync_s == 0.1
    assert lora.train_s < full.train_s
    text = configuration(dataclasses.replace(QUESTION, lora_rank=20), lora, "m")
    assert "enable_lora: true" in text
    assert "max_lora_rank: 32" in text
    assert "api_server_count" not in text


def test_ranks_with_their_own_attention_share_the_experts() -> None:
    mixture = dataclasses.replace(
        QUESTION, shape=shape_of(SHAPES["qwen3-30b-a3b"], "moe"), gpu=gpu_of("L40S"), trainer_gpus=0
    )
    found = [choice for choice in ranked(mixture) if choice.layout.data_parallel == 8]
    assert found[0].memory.weights < 61 / 8 + 6
    text = configuration(mixture, found[0], "m")
    assert "data_parallel_size: 8" in text
    assert "enable_expert_parallel: true" in text
    assert not any(choice.layout.data_parallel > 1 for choice in ranked(dataclasses.replace(mixture, lora_rank=8)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 0}, "--nodes 0: from 1 to 1024"),
        ({"nodes": 10**6}, "--nodes 1000000: from 1 to 1024"),
        ({"cpu_factor": float("nan")}, "--cpu-factor nan: above 0"),
        ({"mfu": float("nan")}, "--mfu nan: above 0"),
        ({"is_colocated": True, "trainer_gpus": 4}, "--trainer-gpus with --colocated"),
        ({"lora_rank": -1}, "--lora -1: a rank"),
        ({"gpus": 0}, "--gpus 0: from 1 to 72"),
        ({"trainer_gpus": 8}, "--trainer-gpus 8: from 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(QUESTION, **given)


def test_many_nodes_are_planned_by_whole_nodes() -> None:
    large = dataclasses.replace(QUESTION, nodes=256, work=dataclasses.replace(QUESTION.work, prompts=16))
    trainers = {layout.trainer_gpus for layout in layouts(large)}
    assert len(trainers) <= 16
    assert all(gpus % 8 == 0 for gpus in trainers)
