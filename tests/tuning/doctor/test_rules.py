"""Each rule on a value that is wrong and on one that is right."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config.load import explain, load
from tuning.doctor.finding import Finding, Severity
from tuning.doctor.rules.all import SECTIONS, examine
from tuning.doctor.subject import subject_of

EXAMPLES = Path(__file__).parents[3] / "examples"
HURTS, CONSIDER, FINE = [Severity.HURTS], [Severity.CONSIDER], list[Severity]()
SEVEN_B = "Qwen/Qwen2-7B-Instruct"
R, A, M = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor.", "actor_rollout_ref.model."
# A verl run on GPUs of one node that has nothing to complain of but what a row says.
OFFLOADED = {A + "fsdp_config.param_offload": True, A + "fsdp_config.optimizer_offload": True}
VEOMNI = {"model_engine": "veomni", A + "veomni.param_offload": True, A + "veomni.optimizer_offload": True}
FOUR_A_SEQUENCE = {A + "fsdp_config.ulysses_sequence_parallel_size": 4}
DISTILLED = "distillation.distillation_loss"
VERL = {
    "data.train_batch_size": 512,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 7168,
    R + "name": "vllm",
    R + "n": 8,
    R + "tensor_model_parallel_size": 1,
    M + "path": SEVEN_B,
    A + "use_dynamic_bsz": True,
    "algorithm.adv_estimator": "grpo",
}


def ours(folder: Path, **engine: Any) -> list[Finding]:
    path = folder / "ours.yaml"
    path.write_text(yaml.safe_dump({"engine": {"kind": "vllm", "model": SEVEN_B, **engine}}), encoding="utf-8")
    return examine(subject_of(config=load(path, (), {}), settings=explain(path, (), {})))


def verl(folder: Path, **given: Any) -> list[Finding]:
    path = folder / "train.sh"
    values = VERL | given
    words = " ".join(f"'{key}={yaml.safe_dump(value).splitlines()[0]}'" for key, value in values.items())
    path.write_text(f"python3 -m verl.trainer.main_ppo {words}\n", encoding="utf-8")
    return examine(subject_of(verl=path))


def trl(folder: Path, *, with_ours: bool = False, processes: int = 1, **given: Any) -> list[Finding]:
    path = folder / "trl.yaml"
    path.write_text(yaml.safe_dump({"use_vllm": True, "vllm_mode": "server", **given}), encoding="utf-8")
    if not with_ours:
        return examine(subject_of(trl=path, trl_processes=processes))
    gateway = folder / "ours.yaml"
    gateway.write_text(yaml.safe_dump({"engine": {"kind": "vllm", "model": SEVEN_B}}), encoding="utf-8")
    config, settings = load(gateway, (), {}), explain(gateway, (), {})
    return examine(subject_of(config=config, settings=settings, trl=path, trl_processes=processes))


def severities(findings: list[Finding], rule: str, key: str = "") -> list[Severity]:
    return [one.severity for one in findings if one.rule == rule and one.key.endswith(key)]


@pytest.mark.parametrize(
    ("rule", "engine", "severity"), [
        ("gpu-memory", {"gpu_memory_utilization": 0.5}, HURTS), ("gpu-memory", {"gpu_memory_utilization": 0.9}, FINE),
        ("gpu-memory", {"gpu_memory_utilization": 0.99}, CONSIDER),
        ("gpu-memory", {"kind": "sglang", "extra": {"mem_fraction_static": 0.5}}, HURTS),
        ("gpu-memory", {"kind": "sglang", "extra": {"mem_fraction_static": 0.85}}, FINE),
        ("gpu-memory", {"kind": "sglang", "extra": {"mem_fraction_static": 0.95}}, CONSIDER),
        ("tensor-parallel", {"tensor_parallel_size": 2}, CONSIDER),
        ("tensor-parallel", {"model": "Llama-3.1-70B", "tensor_parallel_size": 4}, FINE),
        ("tensor-parallel", {"model": "Llama-3.1-70B"}, HURTS),
        ("max-num-batched-tokens", {"max_num_batched_tokens": 1024}, CONSIDER),
        ("max-num-batched-tokens", {"max_num_batched_tokens": 8192}, FINE),
        ("max-num-batched-tokens", {"max_num_batched_tokens": 4096, "enable_chunked_prefill": False,
         "max_model_len": 8192}, HURTS), ("max-num-seqs", {"max_num_seqs": 32}, CONSIDER),
        ("cuda-graphs", {"enforce_eager": True}, HURTS),
        ("capture-sizes", {"cudagraph_capture_sizes": [1, 8, 32]}, HURTS),
        ("capture-sizes", {"max_cudagraph_capture_size": 128}, CONSIDER),
        ("capture-sizes", {"cudagraph_capture_sizes": [1, 256]}, FINE),

        ("chunked-prefill", {"enable_chunked_prefill": False}, CONSIDER),
        ("prefix-caching", {"enable_prefix_caching": False}, CONSIDER),
        ("prefix-caching", {"kind": "sglang", "extra": {"disable_radix_cache": True}}, CONSIDER),
        ("log-stats", {"disable_log_stats": True}, CONSIDER),
        ("logprobs-mode", {"logprobs_mode": "raw_logprobs"}, HURTS),
        ("seeds", {"extra": {"seed": 1}}, HURTS),
        ("stream-interval", {"stream_interval": 1}, HURTS), ("stream-interval", {"stream_interval": 8}, CONSIDER),
        ("api-servers", {"model": "Qwen/Qwen2-0.5B"}, CONSIDER),
        ("api-servers", {"tensor_parallel_size": 2}, CONSIDER), ("api-servers", {}, CONSIDER),
        ("api-servers", {"enable_lora": True}, CONSIDER),
        ("api-servers", {"model": "Qwen/Qwen2-0.5B", "api_server_count": 4}, FINE),
        ("data-parallel", {"data_parallel_size": 2}, CONSIDER),
        ("data-parallel", {"data_parallel_size": 2, "extra": {"enable_expert_parallel": True}}, FINE),
        ("tensor-parallel", {"tensor_parallel_size": 2, "api_server_count": 4}, FINE),
        ("dtype", {"dtype": "float32"}, HURTS), ("dtype", {"dtype": "float16"}, CONSIDER),

    ],
)  # fmt: skip
def test_engine_rules(tmp_path: Path, rule: str, engine: dict[str, Any], severity: list[Severity]) -> None:
    assert severities(ours(tmp_path, **engine), rule) == severity


def test_on_cpu_neither_graphs_nor_shares_of_a_gpu_are_judged(tmp_path: Path) -> None:
    found = ours(tmp_path, device="cpu", enforce_eager=True, dtype="float32", kv_cache_memory_bytes=1 << 26)
    assert not {one.rule for one in found} & {"cuda-graphs", "gpu-memory", "dtype", "max-num-seqs", "api-servers"}


@pytest.mark.parametrize(
    ("rule", "key", "given", "severity"), [
        ("gpu-memory", "", {R + "gpu_memory_utilization": 0.8, "trainer.n_gpus_per_node": 1}, HURTS),
        ("gpu-memory", "", {R + "gpu_memory_utilization": 0.8}, FINE),
        ("gpu-memory", "", {R + "gpu_memory_utilization": 0.15}, HURTS),
        ("gpu-memory", "", {R + "gpu_memory_utilization": 0.3}, CONSIDER),
        ("gpu-memory", "", {R + "gpu_memory_utilization": 0.8, "model_engine": "megatron",
         A + "megatron.param_offload": True, A + "megatron.optimizer_offload": True,
         "trainer.n_gpus_per_node": 1}, FINE),
        ("gpu-memory", "", {R + "gpu_memory_utilization": 0.6}, FINE),
        ("gpu-memory", "", {R + "gpu_memory_utilization": 0.5, A + "fsdp_config.param_offload": True,
         A + "fsdp_config.optimizer_offload": True}, CONSIDER),
        ("prefix-caching", "", {R + "enable_prefix_caching": False}, HURTS),
        ("max-num-seqs", "", {R + "max_num_seqs": 64}, HURTS),
        ("max-model-len", "", {R + "max_model_len": 4096}, HURTS),
        ("max-model-len", "", {R + "max_model_len": 8192}, FINE),
        ("max-model-len", "", {R + "max_model_len": 32768}, CONSIDER),

        ("gpu-memory", "", {R + "gpu_memory_utilization": 0.6, **VEOMNI}, CONSIDER),
        ("verl-token-budget", "", {A + "ppo_max_token_len_per_gpu": 4096, **FOUR_A_SEQUENCE}, FINE),
        ("verl-ulysses", "", {"data.max_response_length": 100_000, **FOUR_A_SEQUENCE}, FINE),
        ("prompt-length", "", {"data.truncation": "left"}, CONSIDER), ("prompt-length", "", {}, FINE),
        ("response-length", "", {"data.max_response_length": 512}, CONSIDER),
        ("response-length", "", {"data.max_response_length": -1}, HURTS),
        ("verl-keys", "", {R + "tensor_parallel_size": 2}, HURTS),
        ("verl-keys", "", {R + "repetition_penalty": 1.1}, HURTS),
        ("verl-batches", "", {A + "use_dynamic_bsz": False, "data.train_batch_size": 100}, HURTS),
        ("verl-batches", "", {A + "use_dynamic_bsz": False}, FINE),
        ("verl-micro-batches", "actor.ppo_micro_batch_size_per_gpu", {A + "use_dynamic_bsz": False}, HURTS),
        ("verl-micro-batches", "actor.ppo_micro_batch_size", {A + "use_dynamic_bsz": False,
         A + "ppo_micro_batch_size": 8}, CONSIDER),
        ("verl-micro-batches", "actor.ppo_micro_batch_size", {A + "use_dynamic_bsz": False,
         A + "ppo_micro_batch_size": 8, A + "ppo_micro_batch_size_per_gpu": 1}, HURTS),
        ("verl-micro-batch-size", "", {A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size_per_gpu": 1}, CONSIDER),
        ("verl-micro-batch-size", "", {A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size_per_gpu": 2}, FINE),
        ("verl-micro-batch-size", "", {A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size_per_gpu": 2,
         "trainer.nnodes": 2}, CONSIDER),
        ("verl-micro-batch-size", "", {A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size_per_gpu": 4}, FINE),
        ("verl-micro-batch-size", "", {A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size_per_gpu": 256}, FINE),
        ("verl-dynamic-batches", "use_dynamic_bsz", {A + "use_dynamic_bsz": False}, CONSIDER),
        ("verl-dynamic-batches", "log_prob_use_dynamic_bsz", {R + "log_prob_use_dynamic_bsz": False}, HURTS),
        ("verl-token-budget", "", {A + "ppo_max_token_len_per_gpu": 16383}, CONSIDER),
        ("verl-token-budget", "", {A + "ppo_max_token_len_per_gpu": 8000}, HURTS),
        ("verl-pass-sizes", "rollout.log_prob_max_token_len_per_gpu", {A + "ppo_max_token_len_per_gpu": 4096,
         R + "log_prob_max_token_len_per_gpu": 4096}, CONSIDER),
        ("verl-pass-sizes", "rollout.log_prob_max_token_len_per_gpu",
         {R + "log_prob_max_token_len_per_gpu": 32768}, FINE),
        ("verl-pass-sizes", "critic.ppo_max_token_len_per_gpu", {"algorithm.adv_estimator": "gae"}, FINE),
        ("verl-pass-sizes", "critic.ppo_max_token_len_per_gpu", {"algorithm.adv_estimator": "gae",
         "critic.ppo_max_token_len_per_gpu": 16384}, CONSIDER),
        ("verl-remove-padding", "", {M + "use_remove_padding": False}, HURTS),
        ("verl-ulysses", "", {"data.max_response_length": 40_000}, HURTS),
        ("verl-ulysses", "", {A + "ulysses_sequence_parallel_size": 2}, CONSIDER),
        ("verl-ulysses", "", {A + "ulysses_sequence_parallel_size": 2, M + "use_remove_padding": False}, HURTS),
        ("verl-gradient-checkpointing", "", {M + "enable_gradient_checkpointing": False}, CONSIDER),
        ("verl-activation-offload", "", {"data.max_response_length": 20_000}, CONSIDER),
        ("verl-activation-offload", "", {M + "enable_activation_offload": True, A + "strategy": "megatron"}, HURTS),
        ("verl-entropy-memory", "chunking", {}, CONSIDER),
        ("verl-entropy-memory", "chunking", {A + "ppo_max_token_len_per_gpu": 98304}, CONSIDER),
        ("verl-entropy-memory", "chunking", {A + "entropy_from_logits_with_chunking": True}, FINE),
        ("verl-entropy-memory", "entropy_checkpointing", {A + "entropy_coeff": 0.001}, CONSIDER),
        ("verl-entropy-memory", "use_fused_kernels", {M + "use_fused_kernels": True}, FINE),
        ("verl-fsdp2", "", {}, CONSIDER), ("verl-fsdp2", "", {A + "strategy": "fsdp2"}, FINE),
        ("verl-liger", "", {}, CONSIDER),
        ("verl-liger", "", {M + "use_liger": True}, FINE), ("verl-fsdp2", "", {"trainer.n_gpus_per_node": 1}, FINE),
        ("verl-dynamic-batches", "", {A + "use_dynamic_bsz": False, M + "use_remove_padding": False}, FINE),
        ("verl-entropy-memory", "chunking", {M + "use_remove_padding": False}, FINE),
        ("verl-entropy-memory", "chunking", {A + "ppo_max_token_len_per_gpu": 2048}, FINE),
        ("verl-profiler", "steps", {"global_profiler.tool": "nsys", "global_profiler.steps": [1, 2]}, FINE),
        ("response-length", "", {"data.max_response_length": 1024}, FINE),
        ("response-length", "", {"data.max_response_length": 1024, M + "path": "Qwen/Qwen3-8B"}, CONSIDER),
        ("response-length", "", {"data.max_response_length": 512, "data.train_files": "gsm8k/train.parquet"}, FINE),
        ("response-length", "", {"data.max_response_length": 256, "data.train_files": "gsm8k/train.parquet"}, CONSIDER),
        ("response-length", "", {"data.max_response_length": 512, "data.train_files": "[gsm8k.pq,math.pq]"}, CONSIDER),
        ("tensor-parallel", "", {R + "tensor_model_parallel_size": 2, "data.train_batch_size": 32}, FINE),
        ("max-model-len", "", {}, FINE),
        ("gpu-memory", "", {R + "gpu_memory_utilization": 0.5, **OFFLOADED, "data.train_batch_size": 2}, FINE),
        ("tensor-parallel", "", {R + "tensor_model_parallel_size": 2, R + "gpu_memory_utilization": 0.4}, FINE),
        ("tensor-parallel", "", {R + "tensor_model_parallel_size": 2, R + "gpu_memory_utilization": 0.7}, CONSIDER),
        ("verl-offload", "", {"actor_rollout_ref.hybrid_engine": False, A + "fsdp_config.param_offload": True},
         CONSIDER), ("verl-free-cache", "", {R + "free_cache_engine": False}, CONSIDER),
        ("verl-sampling", "top_p", {R + "top_p": 0.9}, CONSIDER),
        ("verl-sampling", "temperature", {R + "temperature": 0}, HURTS),
        ("verl-balance", "", {"trainer.balance_batch": False}, CONSIDER),
        ("verl-profiler", "", {"global_profiler.tool": "nsys"}, CONSIDER),

        ("verl-group", "", {R + "n": 1}, HURTS),


        ("verl-sampling", "penalty", {f"+{R}repetition_penalty": 1.2}, CONSIDER),
        ("verl-keys", "", {"+data.train_batch_size": 7}, HURTS),
        ("verl-keys", "", {A + "megatron.tensor_model_parallel_size": 2}, HURTS),
    ],
)  # fmt: skip
def test_verl_rules(tmp_path: Path, rule: str, key: str, given: dict[str, Any], severity: list[Severity]) -> None:
    assert severities(verl(tmp_path, **given), rule, key) == severity


@pytest.mark.parametrize(
    ("rule", "given", "severity"), [
        ("trl-vllm", {"use_vllm": False}, HURTS), ("trl-vllm", {"vllm_mode": "colocate"}, FINE),
        ("trl-vllm", {"vllm_mode": "colocate", "gradient_accumulation_steps": 8}, CONSIDER),
        ("gpu-memory", {"vllm_mode": "colocate"}, FINE),
        ("gpu-memory", {"vllm_mode": "colocate", "gradient_accumulation_steps": 8}, CONSIDER),
        ("max-model-len", {"vllm_mode": "colocate"}, FINE),
        ("gpu-memory", {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.9}, CONSIDER),
        ("trl-fields", {"max_prompt_length": 512}, HURTS), ("trl-prompt-batch", {"num_generations": 3}, HURTS),
        ("trl-prompt-batch", {"generation_batch_size": 8, "steps_per_generation": 1}, HURTS),
        ("trl-sampling", {"top_p": 0.9}, CONSIDER),
        ("trl-sampling", {"generation_kwargs": {"seed": 1}}, HURTS),
        ("trl-correction", {"vllm_importance_sampling_correction": False}, CONSIDER),
        ("trl-precision", {"bf16": False}, HURTS), ("trl-precision", {"bf16": False, "use_cpu": True}, FINE),
        ("trl-gradient-checkpointing", {"gradient_checkpointing": False}, CONSIDER),
        ("trl-gradient-checkpointing", {"gradient_checkpointing": False, "use_cpu": True}, FINE),
        ("trl-vllm", {"use_vllm": "true"}, FINE),
        ("trl-sampling", {"temperature": 0}, HURTS), ("trl-sampling", {"num_generations": 1}, HURTS),
        ("trl-sampling", {"repetition_penalty": 1.3}, CONSIDER), ("response-length", {}, CONSIDER),
        ("response-length", {"max_completion_length": 4096}, FINE),
        ("response-length", {"chat_template_kwargs": {"enable_thinking": False}}, FINE),
        ("response-length", {"chat_template_kwargs": {"enable_thinking": True}}, CONSIDER),
    ],
)  # fmt: skip
def test_trl_rules(tmp_path: Path, rule: str, given: dict[str, Any], severity: list[Severity]) -> None:
    assert severities(trl(tmp_path, **given), rule) == severity


@pytest.mark.parametrize(
    ("rule", "given"), [
        ("verl-group", {R + "n": 1, "distillation.enabled": True, f"{DISTILLED}.use_task_rewards": False}),

    ],
)  # fmt: skip
def test_verls_own_recipes_are_no_mistakes(tmp_path: Path, rule: str, given: dict[str, Any]) -> None:
    assert severities(verl(tmp_path, **given), rule) == []


def test_the_engine_of_another_loop_is_judged_by_its_load_alone(tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text("trl vllm-serve --model Qwen/Qwen3-4B --tensor-parallel-size 2\n", encoding="utf-8")
    found = examine(subject_of(trl=path))
    assert severities(found, "tensor-parallel") == severities(found, "max-model-len") == []
    path.write_text(
        f"{path.read_text()}trl grpo --per_device_train_batch_size 256 --use_vllm --vllm_mode server\n",
        encoding="utf-8",
    )
    assert severities(examine(subject_of(trl=path)), "tensor-parallel") == CONSIDER


def test_an_override_behind_a_comment_hurts(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        "python -m verl.trainer.main_ppo data.seed=1 \\\n # lengths\n data.shuffle=False\n", encoding="utf-8"
    )
    (found,) = [one for one in examine(subject_of(verl=path)) if one.rule == "verl-lost-overrides"]
    assert (found.severity, found.place) == (Severity.HURTS, f"{path}:3")


def test_a_key_that_hydra_wants_a_plus_for_is_fine_with_one(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        "python -m verl.trainer.main_ppo +actor_rollout_ref.rollout.repetition_penalty=1.1", encoding="utf-8"
    )
    assert not severities(examine(subject_of(verl=path)), "verl-keys")


@pytest.mark.parametrize("script", ["verl_cpu.sh", "verl_qwen2_7b.sh"])
def test_the_keys_of_verl_behind_a_gateway_are_known(script: str) -> None:
    findings = examine(subject_of(verl=EXAMPLES / script))
    assert not severities(findings, "verl-keys")


def test_a_trainer_that_asks_another_port_than_the_gateways_hurts(tmp_path: Path) -> None:
    asks: dict[str, Any] = {"vllm_server_base_url": "http://127.0.0.1:8000"}
    assert severities(trl(tmp_path, with_ours=True, **asks), "trl-url") == HURTS
    asks = {"vllm_server_base_url": "http://127.0.0.1:8100"}
    assert severities(trl(tmp_path, with_ours=True, **asks), "trl-url") == []


def test_a_colocated_trainer_beside_a_gateway_hurts(tmp_path: Path) -> None:
    assert severities(trl(tmp_path, with_ours=True, vllm_mode="colocate"), "trl-vllm") == HURTS


def test_the_load_of_a_replica_is_the_trainers_batch(tmp_path: Path) -> None:
    gateway, trainer = tmp_path / "ours.yaml", tmp_path / "trl.yaml"
    engine = {"kind": "vllm", "model": SEVEN_B, "num_replicas": 2, "max_num_seqs": 32, "tensor_parallel_size": 2}
    gateway.write_text(yaml.safe_dump({"engine": engine}), encoding="utf-8")
    trainer.write_text("{use_vllm: true, vllm_mode: server, generation_batch_size: 512}", encoding="utf-8")
    found = examine(subject_of(config=load(gateway, (), {}), settings=explain(gateway, (), {}), trl=trainer))
    (seqs,) = [one for one in found if one.rule == "max-num-seqs"]
    assert seqs.severity is Severity.HURTS
    assert "256 completions" in seqs.message
    assert severities(found, "tensor-parallel") == HURTS


def test_groups_have_findings_of_their_own_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(
        f"engine:\n  model: {SEVEN_B}\n  served_model_name: p\n  enforce_eager: true\n"
        "engines:\n  a: {}\n  b:\n    enforce_eager: false\n",
        encoding="utf-8",
    )
    found = examine(subject_of(config=load(path, (), {}), settings=explain(path, (), {})))
    told = [(one.where, one.place) for one in found if one.rule == "cuda-graphs"]
    assert told == [("gateway engines.a", f"{path}:4")]


def test_every_rule_about_files_is_tried_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    rules = [rule for title, rules in SECTIONS.items() if title != "A running gateway" for rule in rules]
    assert [rule.id for rule in rules if f'"{rule.id}"' not in text and rule.id[:4] != "trl-"] == []


def test_what_could_not_be_read_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("python3 -m verl.trainer.main_ppo data.train_batch_size=$(nproc)\n", encoding="utf-8")
    (found,) = [one for one in examine(subject_of(verl=path)) if one.rule == "verl-unread"]
    assert found.message.endswith("data.train_batch_size=$(nproc): a run alone has its value")


@pytest.mark.parametrize(
    "override",
    [
        "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_grouped_gemm=True",
        "+reward.reward_kwargs.overlong=1",
        "+distillation.teacher_models.big.model_path=/m",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8",
    ],
)
def test_keys_of_free_dictionaries_are_known(tmp_path: Path, override: str) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"python -m verl.trainer.main_ppo model_engine=megatron {override}\n", encoding="utf-8")
    assert not severities(examine(subject_of(verl=path)), "verl-keys")


FSDP_ONLY = {"verl-remove-padding", "verl-ulysses", "verl-liger", "verl-fsdp2"}
FSDP_ONLY |= {"verl-entropy-memory", "verl-gradient-checkpointing"}


@pytest.mark.parametrize("choice", ["model_engine=megatron", "--config-name=ppo_megatron_trainer"])
def test_megatron_is_not_judged_as_fsdp(tmp_path: Path, choice: str) -> None:
    path = tmp_path / "train.sh"
    words = f"{choice} {M}path={SEVEN_B} {R}name=vllm {M}use_remove_padding=False"
    path.write_text(f"python -m verl.trainer.main_ppo {words}\n", encoding="utf-8")
    assert not {one.rule for one in examine(subject_of(verl=path))} & FSDP_ONLY


def test_rollout_fields_without_a_name_are_judged(tmp_path: Path) -> None:
    path = tmp_path / "rollout.yaml"
    path.write_text("gpu_memory_utilization: 0.5\nenforce_eager: true\n", encoding="utf-8")
    found = examine(subject_of(verl=path))
    assert severities(found, "gpu-memory") == HURTS
    assert severities(found, "cuda-graphs") == HURTS


def test_an_npu_gets_no_advice_that_was_made_for_cuda(tmp_path: Path) -> None:
    path = tmp_path / "train_npu.sh"
    path.write_text(f"python -m verl.trainer.main_ppo {R}name=vllm {R}enable_chunked_prefill=False\n", encoding="utf-8")
    assert not {one.rule for one in examine(subject_of(verl=path))} & {"verl-liger", "chunked-prefill"}


PIPELINE = {"model_engine": "megatron", A + "megatron.pipeline_model_parallel_size": 2}


def test_micro_batches_are_not_made_fewer_where_they_fill_a_pipeline(tmp_path: Path) -> None:
    by_count = {A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size_per_gpu": 1}
    by_count[R + "log_prob_micro_batch_size_per_gpu"] = 1
    for rule in ("verl-micro-batch-size", "verl-pass-sizes"):
        assert severities(verl(tmp_path, **by_count), rule)
        assert not severities(verl(tmp_path, **by_count, **PIPELINE), rule)
    budget = {A + "ppo_max_token_len_per_gpu": 10_000}
    assert severities(verl(tmp_path, **budget), "verl-token-budget") == CONSIDER
    assert severities(verl(tmp_path, **budget, **PIPELINE), "verl-token-budget") == FINE


def test_the_mini_batch_of_a_megatron_gpu_is_that_of_its_group(tmp_path: Path) -> None:
    given = {A + "use_dynamic_bsz": False, A + "ppo_micro_batch_size_per_gpu": 1, A + "ppo_mini_batch_size": 64}
    split = {"model_engine": "megatron", A + "megatron.tensor_model_parallel_size": 4}
    (found,) = [one for one in verl(tmp_path, **given, **split) if one.rule == "verl-micro-batch-size"]
    assert "1 of the 256 sequences" in found.message  # 64 prompts x 8 over two groups of four GPUs


def test_a_pass_of_a_reference_that_does_not_run_is_not_judged(tmp_path: Path) -> None:
    short = {A + "ppo_max_token_len_per_gpu": 4096, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 4096}
    keys = [one.key for one in verl(tmp_path, **short) if one.rule == "verl-pass-sizes"]
    with_kl = [one.key for one in verl(tmp_path, **short, **{A + "use_kl_loss": True}) if one.rule == "verl-pass-sizes"]
    assert not any(".ref." in key for key in keys)
    assert any(".ref." in key for key in with_kl)


def test_liger_is_not_advised_for_a_model_that_it_has_no_kernels_for(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"python -m verl.trainer.main_ppo {R}name=vllm {M}path=openbmb/MiniCPM-o-2_6\n", encoding="utf-8")
    assert severities(examine(subject_of(verl=path)), "verl-liger") == []


def test_an_npu_is_not_judged_by_cuda_graphs(tmp_path: Path) -> None:
    path = tmp_path / "train_npu.sh"
    text = f"export HCCL_CONNECT_TIMEOUT=60\npython -m verl.trainer.main_ppo {R}name=vllm {R}enforce_eager=True\n"
    path.write_text(text, encoding="utf-8")
    assert not severities(examine(subject_of(verl=path)), "cuda-graphs")


def test_findings_are_ranked_by_gain_and_general_advice_is_marked(tmp_path: Path) -> None:
    found = verl(tmp_path, **{R + "enforce_eager": True, R + "n": 1, "data.seed": 1})
    hurting = [one.rule for one in found if one.severity is Severity.HURTS]
    assert hurting.index("verl-group") < hurting.index("cuda-graphs")
    gains = [one.gain for one in found if one.severity is Severity.CONSIDER]
    assert gains == sorted(gains, reverse=True)
    assert {one.rule for one in found if one.is_general} >= {"verl-liger", "verl-fsdp2"}


def test_a_script_that_launches_trl_is_read_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "trl vllm-serve --model Qwen/Qwen2-7B --gpu-memory-utilization 0.5 --enforce_eager true &\n"
        "accelerate launch --num_processes 4 train.py --use_vllm --num_generations 1 --vllm_mode=server\n",
        encoding="utf-8",
    )
    found = examine(subject_of(trl=path))
    hurting = {(one.where, one.rule) for one in found if one.severity is Severity.HURTS}
    assert hurting >= {("trl vllm-serve", "gpu-memory"), ("trl vllm-serve", "cuda-graphs"), ("TRL", "trl-sampling")}


def test_expert_parallelism_spreads_the_weights(tmp_path: Path) -> None:
    given = {M + "path": "Qwen/Qwen3-235B-A22B", R + "tensor_model_parallel_size": 4}
    spread = {R + "data_parallel_size": 4, R + "expert_parallel_size": 16}
    assert severities(verl(tmp_path, **given), "tensor-parallel") == HURTS
    assert severities(verl(tmp_path, **given, **spread), "tensor-parallel") == FINE


FORK = ("n_agent=5", "+state_masking=True", "do_vote=True", "env.name=search", "data.max_obs_length=500")


def test_a_fork_has_one_finding_for_its_keys_and_none_for_what_verl_refuses(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    words = f"{R}name=vllm {R}n=1 algorithm.adv_estimator=grpo data.train_batch_size=64 {' '.join(FORK)}"
    path.write_text(f"python -m verl.trainer.main_ppo {words}\n", encoding="utf-8")
    found = examine(subject_of(verl=path))
    (keys,) = [one for one in found if one.rule == "verl-keys"]
    assert (keys.severity, "lacks 4 keys" in keys.message, "env.name" in keys.message) == (
        Severity.CONSIDER,
        True,
        True,
    )
    assert not {one.rule for one in found} & {"verl-micro-batches", "verl-batches", "verl-group"}


def test_a_trainer_that_is_not_verls_is_not_told_what_verl_refuses(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"python -m absolute.main {R}name=vllm data.train_batch_size=64\n", encoding="utf-8")
    assert not [one.rule for one in examine(subject_of(verl=path)) if one.severity is Severity.HURTS]


def test_levers_among_the_engines_own_arguments_are_judged(tmp_path: Path) -> None:
    section = f"+{R}engine_kwargs.vllm."
    given = {section + "enforce_eager": True, section + "max_num_seqs": 16, section + "enable_prefix_caching": False}
    found = verl(tmp_path, **given)
    for rule, lever in (("cuda-graphs", "enforce_eager"), ("max-num-seqs", "max_num_seqs")):
        assert severities(found, rule, f"{section[1:]}{lever}") == HURTS, rule
    assert [one.rule for one in found if one.key.endswith("vllm.enable_prefix_caching")] == ["prefix-caching"]


@pytest.mark.parametrize(
    "server",
    [
        "CUDA_VISIBLE_DEVICES=0,1,2,3 trl vllm-serve --model m &",
        "nohup env CUDA_VISIBLE_DEVICES=3 trl vllm-serve --model m",
    ],
)
def test_a_gpu_of_server_and_trainer_both_hurts(tmp_path: Path, server: str) -> None:
    path = tmp_path / "run.sh"
    launch = "accelerate launch --num_processes 4 train.py --use_vllm True --vllm_mode server --num_generations 8\n"
    for gpus, expected in (("3,4,5,6", HURTS), ("4,5,6,7", FINE)):
        path.write_text(f"{server}\nexport CUDA_VISIBLE_DEVICES={gpus}\n{launch}", encoding="utf-8")
        assert severities(examine(subject_of(trl=path)), "trl-vllm") == expected


def test_a_batch_of_a_file_that_names_no_processes_may_divide_with_more(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    given = {"use_vllm": True, "num_generations": 14, "per_device_train_batch_size": 16}
    path.write_text(yaml.safe_dump(given | {"gradient_accumulation_steps": 1}), encoding="utf-8")
    assert severities(examine(subject_of(trl=path)), "trl-prompt-batch") == CONSIDER
    assert severities(examine(subject_of(trl=path, trl_processes=7)), "trl-prompt-batch") == FINE
    assert severities(examine(subject_of(trl=path, trl_processes=2)), "trl-prompt-batch") == HURTS
