"""A plan as a table, as JSON, and as a configuration that `up` takes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import yaml
from rich.console import Console

from gateway.config.schema import Config
from tuning.plan.choices import Choice
from tuning.plan.memory import GPU_SHARE, MAX_NUM_BATCHED_TOKENS
from tuning.plan.question import Question
from tuning.plan.shape import ModelShape
from tuning.plan.trainer import Offload, Training

_USUAL_GPUS = 8
# vLLM's choices of the largest rank.
_SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def print_plan(console: Console, question: Question, choices: Sequence[Choice]) -> None:
    """The choices in their order, and what the first asks of trainer and memory."""
    shape, work = question.shape, question.work
    lines = [
        f"{shape.name}: {shape.parameters / 1e9:.2f} billion parameters, {shape.weight_bytes / 2**30:.1f} GiB of "
        f"weights, {_kv_of_a_token(shape)}",
        f"a step: {work.prompts} prompts x {work.samples} samples, {work.prompt.mean:g} tokens in (at most "
        f"{work.prompt.longest}), {work.response.mean:g} out (at most {work.response.longest}, which "
        f"{work.response.cut:.0%} reach)",
        "",
        *_table(choices),
        "",
        *_notes(question, choices[0]),
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _kv_of_a_token(shape: ModelShape) -> str:
    """The KV cache of a token, which sliding layers hold within their window alone."""
    near, beyond = shape.kv_bytes(1) / 1024, shape.kv_bytes(1, math.inf) / 1024
    text = f"{near:.0f} KiB of KV cache a token"
    return f"{text} up to {shape.window:,} tokens, {beyond:.0f} beyond" if beyond < near else text


def as_json(question: Question, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the table's data and all choices, for JSON."""
    shape, work = question.shape, question.work
    return {
        "model": asdict(shape) | {"parameters": shape.parameters, "weight_bytes": shape.weight_bytes},
        "gpu": asdict(question.gpu),
        "gpus": question.gpus,
        "nodes": question.nodes,
        "is_colocated": question.is_colocated,
        "lora_rank": question.lora_rank,
        "workload": asdict(work) | {"longest": work.longest},
        "speeds": asdict(question.speeds),
        "mfu": question.mfu,
        "cpu_factor": question.cpu_factor,
        "choices": [_row(choice) for choice in choices],
    }


def _row(choice: Choice) -> dict[str, Any]:
    """The choice with its layout and training as plain values."""
    layout, training = choice.layout, choice.layout.training
    row = {name: value for name, value in asdict(choice).items() if name != "layout"}
    for name in ("trainer_gpus", "is_colocated", "is_parked", "tensor_parallel", "data_parallel", "replicas"):
        row[name] = getattr(layout, name)
    trained = ("lora_rank", "offload", "sequence_parallel", "chunked_logits")
    row["training"] = {name: getattr(training, name) for name in trained} if training else None
    return row | {"limit": choice.limit}


def configuration(question: Question, choice: Choice, model: str) -> str:
    """YAML of the choice, for `rollout-gateway up -c`. `model` is the folder or id that engines load."""
    work = question.work
    engine: dict[str, Any] = {
        "kind": "vllm",
        "model": model,
        "num_replicas": choice.layout.replicas,
        "tensor_parallel_size": choice.layout.tensor_parallel,
        "dtype": "bfloat16",
        "max_model_len": work.longest,
        "max_num_seqs": choice.max_num_seqs,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "gpu_memory_utilization": GPU_SHARE,
        "enable_prefix_caching": True,
    }
    if choice.api_servers > 1:
        engine["api_server_count"] = choice.api_servers
    if choice.layout.data_parallel > 1:
        engine |= {"data_parallel_size": choice.layout.data_parallel, "extra": {"enable_expert_parallel": True}}
    if question.lora_rank:
        engine |= {"enable_lora": True, "max_lora_rank": _served_rank(question.lora_rank)}
    Config.model_validate({"engine": engine})
    head = (
        f"# {choice.layout.replicas} replicas of {_size(choice)} x {question.gpu.name}, by `rollout-gateway plan`.\n"
        f"# Expected: {choice.tokens_per_s:,.0f} tokens/s, {choice.rollout_s:.1f} s for {work.prompts} prompts x "
        f"{work.samples} samples of {work.response.mean:g} tokens.\n"
    )
    return head + yaml.safe_dump({"engine": engine}, sort_keys=False)


def verl_overrides(question: Question, choice: Choice) -> dict[str, Any]:
    """Return verl's overrides for a colocated choice, whose engines are verl's own."""
    work, training = question.work, choice.layout.training
    assert training is not None
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    # verl's guide wants room for two sequences of full length where memory has it.
    sequences = max(1, min(2, training.largest_micro_batch(question.gpu, work)))
    found: dict[str, Any] = {
        "trainer.nnodes": question.nodes,
        "trainer.n_gpus_per_node": question.gpus,
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": work.prompt.longest,
        "data.max_response_length": work.response.longest,
        rollout + "name": "vllm",
        rollout + "n": work.samples,
        rollout + "tensor_model_parallel_size": choice.layout.tensor_parallel,
        rollout + "gpu_memory_utilization": choice.memory.share,
        rollout + "max_num_seqs": choice.max_num_seqs,
        rollout + "max_model_len": work.longest,
        actor + "use_dynamic_bsz": True,
        actor + "ppo_max_token_len_per_gpu": math.ceil(sequences * work.longest / training.sequence_parallel),
        actor + "fsdp_config.param_offload": choice.layout.is_parked,
        actor + "fsdp_config.optimizer_offload": choice.layout.is_parked,
    }
    if choice.layout.data_parallel > 1:
        found |= {rollout + f"{kind}_parallel_size": choice.layout.data_parallel for kind in ("data", "expert")}
    if training.sequence_parallel > 1:
        found[actor + "ulysses_sequence_parallel_size"] = training.sequence_parallel
    if training.chunked_logits:
        found["actor_rollout_ref.model.use_fused_kernels"] = True
    if training.lora_rank:
        found["actor_rollout_ref.model.lora_rank"] = training.lora_rank
    if training.offload is Offload.ALL:
        found |= {actor + "strategy": "fsdp2", actor + "fsdp_config.offload_policy": True}
    return found


def _served_rank(rank: int) -> int:
    """The least rank of vLLM's choices that holds an adapter."""
    return next((served for served in _SERVED_RANKS if served >= rank), _SERVED_RANKS[-1])


def _size(choice: Choice) -> str:
    """The GPUs of a replica, with its data parallel ranks."""
    return (
        f"{choice.layout.tensor_parallel}"
        if choice.layout.data_parallel == 1
        else f"DP{choice.layout.data_parallel}+EP"
    )


def _table(choices: Sequence[Choice]) -> Iterator[str]:
    form = "{:>7} {:>9} {:>7} {:>9} {:>7} {:>11} {:>7} {:>9}  {:<12} {}".format
    yield form(
        "step s", "rollout s", "train s", "tokens/s", "trainer", "replicas", "max_num", "full ones", "", ""
    ).rstrip()
    yield form("", "", "", "", "GPUs", "x TP", "_seqs", "fit", "limit", "training")
    for choice in choices:
        how = f"{choice.layout.training or '-'}{', parked' if choice.layout.is_parked else ''}"
        yield form(
            f"{choice.step_s:.1f}", f"{choice.rollout_s:.1f}", f"{choice.train_s:.1f}", f"{choice.tokens_per_s:,.0f}",
            choice.layout.trainer_gpus, f"{choice.layout.replicas} x {_size(choice)}", choice.max_num_seqs,
            choice.full_sequences, choice.limit, how if choice.is_even else f"{how}, uneven",
        )  # fmt: skip


def _notes(question: Question, first: Choice) -> list[str]:
    memory = first.memory
    lines = [
        f"an engine's GPU: {memory.weights:.1f} GiB of weights, {memory.activations:.1f} of activations, "
        f"{memory.graphs:.1f} of CUDA and graphs, {memory.kv_cache:.1f} of KV cache ({memory.kv_tokens:,.0f} tokens)"
    ]
    if question.gpus > _USUAL_GPUS:
        lines.append(
            f"--gpus {question.gpus} is one node with links between all of them; several nodes of 8 are --gpus 8 "
            f"--nodes {-(-question.gpus // _USUAL_GPUS)}"
        )
    if first.layout.training:
        lines += _training_notes(question, first, first.layout.training)
    lines.append("tokens/s are predicted by a model that was fitted to vLLM 0.26 on H200 (docs/plan.md)")
    if first.layout.training:
        lines.append(f"training time assumes {question.mfu:g} of the GPU's FLOP/s (--mfu): nothing here was measured")
    return lines


def _training_notes(question: Question, first: Choice, training: Training) -> list[str]:
    work = question.work
    needed = training.gib(work, 1)
    lines = [f"a training GPU needs {needed:.1f} of its {question.gpu.memory_gib:g} GiB for one sequence: {training}"]
    if question.is_colocated:
        overrides = (f"    {key}={value}" for key, value in verl_overrides(question, first).items())
        lines.append(" \\\n".join(["verl:", *overrides]))
    if training.offload is Offload.OPTIMIZER:
        lines.append("the optimizer works on the host: Megatron's optimizer_cpu_offload, DeepSpeed's ZeRO-Offload")
    if first.layout.is_parked or training.offload is not Offload.NONE:
        nodes = max(1, training.gpus // question.gpus)
        lines.append(f"the trainer's state takes {training.state_bytes / nodes / 2**30:,.0f} GiB of a node's memory")
    if first.trl:
        batch, processes = first.trl, training.gpus
        lines.append(
            f"TRL on {processes} processes: per_device_train_batch_size={batch.per_device_train_batch_size}, "
            f"steps_per_generation={batch.steps_per_generation}, num_generations={work.samples}"
        )
    elif not first.is_even:
        lines.append(
            f"{work.completions} completions cannot be dealt out evenly to {training.groups} training processes: take "
            f"a multiple of {training.groups}"
        )
    return lines
