"""A plan as a table, as JSON, and as a configuration that `up` takes."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from gateway.config.schema import Config
from tuning.plan.choices import Choice
from tuning.plan.memory import GPU_SHARE, MAX_NUM_BATCHED_TOKENS
from tuning.plan.question import Question
from tuning.plan.trainer import Offload, Training

_WIDTH_OF_A_PIPE = 180
_USUAL_GPUS = 8
# vLLM's choices of the largest rank.
_SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def print_plan(console: Console, question: Question, choices: Sequence[Choice]) -> None:
    """The choices in their order, and what the first asks of trainer and memory."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_OF_A_PIPE)
    shape, work = question.shape, question.work
    lines = [
        f"{shape.name}: {shape.parameters / 1e9:.2f} billion parameters, {shape.weight_bytes / 2**30:.1f} GiB of "
        f"weights, {shape.kv_bytes(1) / 1024:.0f} KiB of KV cache a token",
        f"a step: {work.prompts} prompts x {work.samples} samples, {work.prompt.mean:g} tokens in (at most "
        f"{work.prompt.longest}), {work.response.mean:g} out (at most {work.response.longest}, which "
        f"{work.response.cut:.0%} reach)",
    ]
    console.print("\n".join(lines) + "\n", markup=False, highlight=False, soft_wrap=True)
    console.print(_table(choices), markup=False)
    console.print("\n" + "\n".join(_notes(question, choices[0])), markup=False, highlight=False, soft_wrap=True)


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
        "overlaps": question.overlaps,
        "mfu": question.mfu,
        "cpu_factor": question.cpu_factor,
        "choices": [_row(choice) for choice in choices],
    }


def _row(choice: Choice) -> dict[str, Any]:
    """The choice with its layout and training as plain values."""
    layout, training = choice.layout, choice.training
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
        "num_replicas": choice.replicas,
        "tensor_parallel_size": choice.tensor_parallel,
        "dtype": "bfloat16",
        "max_model_len": work.longest,
        "max_num_seqs": choice.max_num_seqs,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "gpu_memory_utilization": GPU_SHARE,
        "enable_prefix_caching": True,
    }
    if choice.api_servers > 1:
        engine["api_server_count"] = choice.api_servers
    if choice.data_parallel > 1:
        engine |= {"data_parallel_size": choice.data_parallel, "extra": {"enable_expert_parallel": True}}
    if question.lora_rank:
        engine |= {"enable_lora": True, "max_lora_rank": _served_rank(question.lora_rank)}
    Config.model_validate({"engine": engine})
    head = (
        f"# {choice.replicas} replicas of {_size(choice)} x {question.gpu.name}, by `rollout-gateway plan`.\n"
        f"# Expected: {choice.tokens_per_s:,.0f} tokens/s, {choice.rollout_s:.1f} s for {work.prompts} prompts x "
        f"{work.samples} samples of {work.response.mean:g} tokens.\n"
    )
    return head + yaml.safe_dump({"engine": engine}, sort_keys=False)


def verl_overrides(question: Question, choice: Choice) -> dict[str, Any]:
    """Return verl's overrides for a colocated choice, whose engines are verl's own."""
    work, training = question.work, choice.training
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
        rollout + "tensor_model_parallel_size": choice.tensor_parallel,
        rollout + "gpu_memory_utilization": choice.memory.share,
        rollout + "max_num_seqs": choice.max_num_seqs,
        rollout + "max_model_len": work.longest,
        actor + "use_dynamic_bsz": True,
        actor + "ppo_max_token_len_per_gpu": math.ceil(sequences * work.longest / training.sequence_parallel),
        actor + "fsdp_config.param_offload": choice.layout.is_parked,
        actor + "fsdp_config.optimizer_offload": choice.layout.is_parked,
    }
    if choice.data_parallel > 1:
        found |= {rollout + f"{kind}_parallel_size": choice.data_parallel for kind in ("data", "expert")}
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
    return f"{choice.tensor_parallel}" if choice.data_parallel == 1 else f"DP{choice.data_parallel}+EP"


def _table(choices: Sequence[Choice]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("step s", "rollout s", "train s", "tokens/s", "trainer GPUs", "replicas x TP", "max_num_seqs", "API"):
        table.add_column(name, justify="right")
    for name in ("running", "full ones fit", "training", "TRL batch", "limit"):
        table.add_column(name, justify="right")
    for choice in choices:
        table.add_row(
            f"{choice.step_s:.1f}",
            f"{choice.rollout_s:.1f}",
            f"{choice.train_s:.1f}",
            f"{choice.tokens_per_s:,.0f}",
            str(choice.trainer_gpus),
            f"{choice.replicas} x {_size(choice)}",
            str(choice.max_num_seqs),
            str(choice.api_servers),
            str(choice.on_rank.most_running * choice.data_parallel),
            str(choice.full_sequences),
            _training(choice),
            _trl_batch(choice),
            choice.limit,
        )
    return table


def _training(choice: Choice) -> str:
    if choice.training is None:
        return "-"
    return f"{choice.training}{', parked' if choice.layout.is_parked else ''}"


def _trl_batch(choice: Choice) -> str:
    if choice.trl is None:
        return "uneven" if not choice.is_even else "-"
    batch = choice.trl
    return f"{batch.per_device_train_batch_size} x {choice.trainer_gpus} x {batch.steps_per_generation}"


def _notes(question: Question, first: Choice) -> list[str]:
    memory = first.memory
    lines = [
        f"an engine's GPU holds {memory.weights:.1f} GiB of weights, {memory.activations:.1f} of activations, "
        f"{memory.graphs:.1f} of CUDA and its graphs, {memory.kv_cache:.1f} of KV cache; "
        f"{'a rank' if first.data_parallel > 1 else 'a replica'}'s holds {memory.kv_tokens:,.0f} tokens"
    ]
    if question.gpus > _USUAL_GPUS:
        lines.append(
            f"--gpus {question.gpus} is one node with links between all of them; several nodes of 8 are --gpus 8 "
            f"--nodes {-(-question.gpus // _USUAL_GPUS)}"
        )
    if first.training:
        lines += _training_notes(question, first, first.training)
    lines.append("tokens/s are predicted by a model that was fitted to vLLM 0.26 on H200 (docs/plan.md)")
    if first.training:
        lines.append(f"training time assumes {question.mfu:g} of the GPU's FLOP/s (--mfu): nothing here was measured")
    return lines


def _training_notes(question: Question, first: Choice, training: Training) -> list[str]:
    work = question.work
    needed = training.gib(work, 1)
    lines = [f"a training GPU needs {needed:.1f} of its {question.gpu.memory_gib:g} GiB for one sequence: {training}"]
    if question.is_colocated:
        overrides = " ".join(f"{key}={value}" for key, value in verl_overrides(question, first).items())
        lines.append(f"verl: {overrides}")
    if training.offload is Offload.OPTIMIZER:
        lines.append("the optimizer works on the host: Megatron's optimizer_cpu_offload, DeepSpeed's ZeRO-Offload")
    if first.layout.is_parked or training.offload is not Offload.NONE:
        nodes = max(1, training.gpus // question.gpus)
        lines.append(f"the trainer's state takes {training.state_bytes / nodes / 2**30:,.0f} GiB of a node's memory")
    if first.trl:
        batch, processes = first.trl, training.gpus
        lines.append(
            f"TRL on {processes} processes: per_device_train_batch_size={batch.per_device_train_batch_size}, "
            f"steps_per_generation={batch.steps_per_generation}, num_generations={work.samples}: "
            f"{batch.per_device_train_batch_size} x {processes} x {batch.steps_per_generation} / {work.samples} = "
            f"{work.prompts} prompts a request"
        )
    elif not first.is_even:
        lines.append(
            f"{work.completions} completions cannot be dealt out evenly to {training.groups} training processes: take "
            f"a multiple of {training.groups}"
        )
    return lines
