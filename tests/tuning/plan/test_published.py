"""What is planned of published models, against the bytes of their checkpoints and the machines that hold them."""

import json
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ConfigError
from gateway.config.load import explain, load
from tests.tuning.plan.published import MACHINES, MODELS, TRAINED, question, work
from tuning.doctor.finding import Severity
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of
from tuning.plan.choices import Choice, ranked
from tuning.plan.gpu import GPUS
from tuning.plan.question import Question
from tuning.plan.report import configuration, verl_overrides
from tuning.plan.shape import shape_of

PAIRS = [(model, machine) for model in MODELS for machine in MACHINES]
# More bytes of weights than the GPUs have.
IMPOSSIBLE = {("DeepSeek-V3", "8 x H100"), ("DeepSeek-V3", "4 x L40S")}
# Engines that model cards and the guides of vLLM and SGLang name: the fewest GPUs of each kind.
SERVED = [
    ("Qwen2.5-7B", "L40S", 1, 1),
    ("Qwen2.5-7B-AWQ", "L4", 1, 1),
    ("Llama-3.1-70B", "H100", 4, 1),
    ("Llama-3.1-70B", "H200", 2, 1),
    ("Llama-3.1-70B-FP8", "H100", 2, 1),
    ("Llama-3.1-70B-FP8", "H200", 1, 1),
    ("Qwen3-30B-A3B", "H100", 1, 1),
    ("gemma-3-27b", "H100", 1, 1),
    ("gemma-3-27b", "L40S", 2, 1),
    ("gpt-oss-120b", "H100", 1, 1),
    ("DeepSeek-V3", "H200", 8, 1),
    ("DeepSeek-V3", "H100", 8, 2),
    ("DeepSeek-V3", "H20", 8, 2),
    ("DeepSeek-V3", "B200", 8, 1),
]
# verl's docs/perf/device_tuning.rst and dpsk.md, and the scripts that they name: lengths, and rank of LoRA.
TRAINED_ON = [
    ("Qwen2-7B", "H800", 2, 1, 1024, 1024, 0),
    ("Qwen2-7B", "H100", 1, 1, 512, 1024, 32),
    ("Qwen2.5-14B", "H800", 4, 1, 1024, 1024, 0),
    ("Qwen2.5-14B", "H100", 2, 1, 512, 1024, 32),
    ("Qwen2.5-32B", "H20", 8, 1, 2048, 6144, 0),
    ("Qwen2.5-32B", "H100", 4, 1, 512, 1024, 32),
    ("Qwen2-72B", "H800", 8, 4, 512, 512, 0),
    ("Qwen2-72B", "H20", 8, 4, 512, 512, 0),
    ("Qwen2-72B", "H100", 8, 1, 512, 1024, 32),
    ("Qwen3-30B-A3B", "H20", 8, 1, 2048, 8192, 0),
    ("Qwen3-30B-A3B", "H100", 8, 1, 2048, 8192, 0),
    ("Qwen3-235B-A22B", "H20", 8, 4, 2048, 9632, 0),
    ("DeepSeek-V3", "H20", 8, 12, 2048, 9632, 0),
]


def plan_of(model: str, where: str, **given: Any) -> tuple[Question, list[Choice]]:
    gpu, gpus = MACHINES[where]
    asked = question(MODELS[model].shape(model), gpu, gpus, **given)
    try:
        return asked, ranked(asked)
    except ConfigError:
        return asked, []


@pytest.mark.parametrize(("model", "where"), PAIRS)
def test_weights_of_every_choice_are_within_three_percent_of_the_published_checkpoint(model: str, where: str) -> None:
    """GPUs that hold all of a weight each, as data parallel ranks do, count it once."""
    published = MODELS[model]
    _, choices = plan_of(model, where, trainer_gpus=0)
    for choice in choices:
        whole = choice.memory.weights * 2**30 * choice.layout.tensor_parallel
        if choice.layout.data_parallel == 1:
            assert whole == pytest.approx(published.gigabytes * 1e9, rel=0.03)
        else:
            assert whole < published.gigabytes * 1e9


@pytest.mark.parametrize(("model", "gpu", "gpus", "nodes"), SERVED)
def test_engines_that_are_published_as_possible_are(model: str, gpu: str, gpus: int, nodes: int) -> None:
    shape = MODELS[model].shape(model)
    asked = question(shape, GPUS[gpu], gpus, nodes=nodes, trainer_gpus=0, work=work(512, 1536))
    assert ranked(asked)


@pytest.mark.parametrize(("model", "gpu", "gpus", "nodes", "prompt", "response", "lora"), TRAINED_ON)
def test_training_that_is_published_as_possible_is(
    model: str, gpu: str, gpus: int, nodes: int, prompt: int, response: int, lora: int
) -> None:
    shape = shape_of(TRAINED[model], model)
    asked = question(
        shape, GPUS[gpu], gpus, nodes=nodes, is_colocated=True, lora_rank=lora, work=work(prompt, response, 512)
    )
    assert ranked(asked)


@pytest.mark.parametrize(("model", "where"), sorted(IMPOSSIBLE))
def test_an_impossible_ask_names_what_to_try(model: str, where: str) -> None:
    gpu, gpus = MACHINES[where]
    with pytest.raises(ConfigError, match="try more --nodes"):
        ranked(question(MODELS[model].shape(model), gpu, gpus))


@pytest.mark.parametrize(("model", "where"), PAIRS)
def test_the_doctor_finds_nothing_in_a_configuration_that_plan_writes(model: str, where: str, tmp_path: Path) -> None:
    asked, choices = plan_of(model, where, trainer_gpus=0)
    assert bool(choices) is ((model, where) not in IMPOSSIBLE)
    if not choices:
        return
    folder = tmp_path / model
    folder.mkdir()
    published = MODELS[model]
    config = published.config | ({"quantization_config": published.quantization} if published.quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    file = tmp_path / "plan.yaml"
    file.write_text(configuration(asked, choices[0], str(folder)))
    subject = subject_of(
        config=load(file, environ={}), settings=explain(file, environ={}), gpu_gib=MACHINES[where][0].memory_gib
    )
    found = [one for one in examine(subject) if one.severity is not Severity.FINE]
    assert [(one.rule, one.key, one.message) for one in found] == []


@pytest.mark.parametrize("model", ["Qwen2-7B", "Qwen2.5-32B", "Qwen3-30B-A3B"])
def test_the_doctor_finds_nothing_that_hurts_in_verls_overrides_of_a_colocated_plan(model: str, tmp_path: Path) -> None:
    asked = question(shape_of(TRAINED[model], model), GPUS["H100"], 8, is_colocated=True, work=work(1024, 3072, 512))
    overrides = verl_overrides(asked, ranked(asked)[0]) | {
        "actor_rollout_ref.model.path": f"Qwen/{model}",
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
    }
    file = tmp_path / "train.sh"
    words = " ".join(f"{key}={value}" for key, value in overrides.items())
    file.write_text(f"python3 -m verl.trainer.main_ppo {words}\n")
    found = [one for one in examine(subject_of(verl=file)) if one.severity is Severity.HURTS]
    assert [(one.rule, one.key, one.message) for one in found] == []
