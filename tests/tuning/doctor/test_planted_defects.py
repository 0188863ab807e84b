"""Recall: one defect planted in a good configuration is found. Each good configuration has none that hurts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tuning.doctor.finding import Finding, Severity
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of

R, A, M = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor.", "actor_rollout_ref.model."
_FSDP: dict[str, Any] = {
    "data.train_batch_size": 512,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 7168,
    "data.filter_overlong_prompts": True,
    "algorithm.adv_estimator": "grpo",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    M + "path": "Qwen/Qwen2.5-7B-Instruct",
    A + "ppo_mini_batch_size": 128,
    A + "use_dynamic_bsz": True,
    R + "name": "vllm",
    R + "n": 8,
    R + "tensor_model_parallel_size": 1,
    R + "gpu_memory_utilization": 0.6,
}
_BY_COUNT = {
    A + "use_dynamic_bsz": False,
    A + "ppo_micro_batch_size_per_gpu": 4,
    R + "log_prob_micro_batch_size_per_gpu": 8,
}
_PPO = {"algorithm.adv_estimator": "gae", "critic.model.path": "Qwen/Qwen2.5-7B-Instruct", R + "n": 1}
GOOD: dict[str, dict[str, Any]] = {
    "FSDP, vLLM": _FSDP,
    "FSDP, SGLang": _FSDP | {R + "name": "sglang"},
    "batches by count": _FSDP | _BY_COUNT,
    "PPO": _FSDP | _PPO,
    "Megatron": _FSDP | {"model_engine": "megatron", A + "megatron.tensor_model_parallel_size": 2},
}
# Each is what somebody writes, and the key that the finding has to name.
DEFECTS: list[tuple[dict[str, Any], str]] = [
    ({R + "tensor_parallel_size": 2}, "tensor_parallel_size"),
    ({A + "ppo_minibatch_size": 64}, "ppo_minibatch_size"),
    ({"+data.train_batch_size": 64}, "train_batch_size"),
    ({"trainer.project_name": "<name>"}, "project_name"),
    ({R + "engine_kwargs.vllm.kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    ({R + "temperature": 0}, "temperature"),
    ({R + "top_p": 0.7}, "top_p"),
    ({R + "enforce_eager": True}, "enforce_eager"),
    ({R + "gpu_memory_utilization": 0.15}, "gpu_memory_utilization"),
    ({R + "max_num_seqs": 16}, "max_num_seqs"),
    ({R + "max_model_len": 4096}, "max_model_len"),
    ({"data.max_response_length": -1}, "response_length"),
]


def overrides(values: dict[str, Any]) -> str:
    return " ".join(
        f"'{key}={value if isinstance(value, str) else json.dumps(value)}'" for key, value in values.items()
    )


def findings(folder: Path, values: dict[str, Any]) -> list[Finding]:
    path = folder / "train.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo {overrides(values)}\n", encoding="utf-8")
    return examine(subject_of(verl=path))


def is_found(key: str, before: list[Finding], after: list[Finding]) -> bool:
    """True if a finding on the key is new."""
    known, now = (
        {(one.rule, one.key, one.severity) for one in told if one.severity is not Severity.FINE}
        for told in (before, after)
    )
    return any(name.endswith(key) for _, name, _ in now - known)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_configuration_has_nothing_that_hurts(tmp_path: Path, name: str) -> None:
    assert [(one.rule, one.key) for one in findings(tmp_path, GOOD[name]) if one.severity is Severity.HURTS] == []


def test_nine_of_ten_planted_defects_are_found(tmp_path: Path) -> None:
    missed = []
    for name, good in GOOD.items():
        before = findings(tmp_path, good)
        for defect, key in DEFECTS:
            if not is_found(key, before, findings(tmp_path, good | defect)):
                missed.append((name, *defect))
    planted = len(GOOD) * len(DEFECTS)
    assert planted >= 60
    assert len(missed) <= 0.1 * planted, missed
