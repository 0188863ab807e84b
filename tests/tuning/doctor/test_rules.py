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
MIXTURE = {M + "path": "Qwen/Qwen3-235B-A22B", R + "tensor_model_parallel_size": 4}
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


def script(folder: Path, words: str, module: str = "verl.trainer.main_ppo") -> list[Finding]:
    path = folder / "train.sh"
    path.write_text(f"python3 -m {module} {words}\n", encoding="utf-8")
    return examine(subject_of(verl=path))


def verl(folder: Path, **given: Any) -> list[Finding]:
    values = VERL | given
    return script(folder, " ".join(f"'{key}={yaml.safe_dump(value).splitlines()[0]}'" for key, value in values.items()))


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
        ("api-servers", {"enable_lora": True}, FINE),
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
        ("prompt-length", "", {"data.truncation": "left"}, CONSIDER), ("prompt-length", "", {}, FINE),
        ("response-length", "", {"data.max_response_length": 512}, CONSIDER),
        ("response-length", "", {"data.max_response_length": -1}, HURTS),
        ("verl-keys", "", {R + "tensor_parallel_size": 2}, HURTS),
        ("verl-keys", "", {R + "repetition_penalty": 1.1}, HURTS),
        ("verl-keys", "", {A + "ppo_minibatch_size": 64}, HURTS),
        ("verl-keys", "", {R + "engine_kwargs.vllm.kv_cache_dtype": "fp8"}, HURTS),
        ("cuda-graphs", "", {R + "enforce_eager": True}, HURTS),
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
        ("verl-group", "", {R + "n": 1}, HURTS),
        ("verl-sampling", "penalty", {f"+{R}repetition_penalty": 1.2}, CONSIDER),
        ("verl-keys", "", {"+data.train_batch_size": 7}, HURTS),
        ("verl-keys", "", {A + "megatron.tensor_model_parallel_size": 2}, HURTS),
        ("verl-keys", "", {f"+{R}repetition_penalty": 1.1}, FINE),
        ("verl-keys", "", {"+reward.reward_kwargs.overlong": 1}, FINE),
        ("verl-keys", "", {f"+{R}engine_kwargs.vllm.kv_cache_dtype": "fp8"}, FINE),
        ("verl-group", "", {R + "n": 1, "distillation.enabled": True,
         "distillation.distillation_loss.use_task_rewards": False}, FINE),
        ("tensor-parallel", "", MIXTURE, HURTS),
        ("tensor-parallel", "", MIXTURE | {R + "data_parallel_size": 4, R + "expert_parallel_size": 16}, FINE),
    ],
)  # fmt: skip
def test_verl_rules(tmp_path: Path, rule: str, key: str, given: dict[str, Any], severity: list[Severity]) -> None:
    assert severities(verl(tmp_path, **given), rule, key) == severity


@pytest.mark.parametrize(
    "given",
    [
        {R + "name": "sglang"},
        {
            A + "use_dynamic_bsz": False,
            A + "ppo_micro_batch_size_per_gpu": 4,
            R + "log_prob_micro_batch_size_per_gpu": 8,
        },
        {"algorithm.adv_estimator": "gae", "critic.model.path": SEVEN_B, R + "n": 1},
        {"model_engine": "megatron", A + "megatron.tensor_model_parallel_size": 2},
    ],
    ids=["SGLang", "batches by count", "PPO", "Megatron"],
)
def test_nothing_hurts_in_a_good_run(tmp_path: Path, given: dict[str, Any]) -> None:
    assert [one for one in verl(tmp_path, **given) if one.severity is Severity.HURTS] == []


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


@pytest.mark.parametrize("script", ["verl_cpu.sh", "verl_qwen2_7b.sh"])
def test_the_keys_of_verl_behind_a_gateway_are_known(script: str) -> None:
    findings = examine(subject_of(verl=EXAMPLES / script))
    assert not severities(findings, "verl-keys")


@pytest.mark.parametrize(
    ("rule", "asks", "severity"),
    [
        ("trl-url", {"vllm_server_base_url": "http://127.0.0.1:8000"}, HURTS),
        ("trl-url", {"vllm_server_base_url": "http://127.0.0.1:8100"}, FINE),
        ("trl-vllm", {"vllm_mode": "colocate"}, HURTS),
    ],
)
def test_a_trainer_beside_a_gateway_asks_it(
    tmp_path: Path, rule: str, asks: dict[str, Any], severity: list[Severity]
) -> None:
    assert severities(trl(tmp_path, with_ours=True, **asks), rule) == severity


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


FORK = "n_agent=5 +state_masking=True do_vote=True env.name=search data.max_obs_length=500"


@pytest.mark.parametrize(
    ("words", "rule", "severity", "told"),
    [
        ("data.seed=1 \\\n # lengths\n data.shuffle=False", "verl-lost-overrides", HURTS, "train.sh:3"),
        ("data.train_batch_size=$(nproc)", "verl-unread", CONSIDER, "data.train_batch_size=$(nproc): a run alone"),
        (f"{R}name=vllm {R}enforce_eager=True\nexport HCCL_CONNECT_TIMEOUT=60", "cuda-graphs", FINE, ""),  # an NPU
        (f"{R}name=vllm {R}n=1 data.train_batch_size=64 {FORK}", "verl-keys", CONSIDER, "lacks 4 keys"),
        (f"{R}name=vllm {R}n=1 data.train_batch_size=64 {FORK}", "verl-group", FINE, ""),
    ],
)
def test_rules_about_scripts(tmp_path: Path, words: str, rule: str, severity: list[Severity], told: str) -> None:
    found = script(tmp_path, words)
    assert severities(found, rule) == severity
    assert told in " ".join(f"{one.place} {one.message}" for one in found if one.rule == rule)


def test_rollout_fields_without_a_name_are_judged(tmp_path: Path) -> None:
    path = tmp_path / "rollout.yaml"
    path.write_text("gpu_memory_utilization: 0.5\nenforce_eager: true\n", encoding="utf-8")
    found = examine(subject_of(verl=path))
    assert severities(found, "gpu-memory") == severities(found, "cuda-graphs") == HURTS


def test_findings_are_ranked_by_gain(tmp_path: Path) -> None:
    found = verl(tmp_path, **{R + "enforce_eager": True, R + "n": 1, "data.seed": 1})
    for severity in (Severity.HURTS, Severity.CONSIDER):
        gains = [one.gain for one in found if one.severity is severity]
        assert gains == sorted(gains, reverse=True)


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
