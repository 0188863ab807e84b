"""A plan as a table, as JSON, and as a configuration that `up` takes."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from gateway.config.schema import Config
from gateway.tuning.plan.choices import Choice, Question
from gateway.tuning.plan.memory import GPU_SHARE, MAX_NUM_BATCHED_TOKENS

_WIDTH_OF_A_PIPE = 160


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
        "workload": asdict(work) | {"longest": work.longest},
        "speeds": asdict(question.speeds),
        "overlaps": question.overlaps,
        "mfu": question.mfu,
        "cpu_factor": question.cpu_factor,
        "choices": [asdict(choice) for choice in choices],
    }


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
    Config.model_validate({"engine": engine})
    head = (
        f"# {choice.replicas} replicas of {choice.tensor_parallel} x {question.gpu.name}, by `rollout-gateway plan`.\n"
        f"# Expected: {choice.tokens_per_s:,.0f} tokens/s, {choice.rollout_s:.1f} s for {work.prompts} prompts x "
        f"{work.samples} samples of {work.response.mean:g} tokens.\n"
    )
    return head + yaml.safe_dump({"engine": engine}, sort_keys=False)


def _table(choices: Sequence[Choice]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("step s", "rollout s", "train s", "tokens/s", "trainer GPUs", "replicas x TP", "max_num_seqs", "API"):
        table.add_column(name, justify="right")
    for name in ("running", "full ones fit", "TRL batch", "limit"):
        table.add_column(name, justify="right")
    for choice in choices:
        table.add_row(
            f"{choice.step_s:.1f}",
            f"{choice.rollout_s:.1f}",
            f"{choice.train_s:.1f}",
            f"{choice.tokens_per_s:,.0f}",
            str(choice.trainer_gpus),
            f"{choice.replicas} x {choice.tensor_parallel}",
            str(choice.max_num_seqs),
            str(choice.api_servers),
            str(choice.on_replica.most_running),
            str(choice.full_sequences),
            _trl_batch(choice),
            choice.limit,
        )
    return table


def _trl_batch(choice: Choice) -> str:
    if choice.trl is None:
        return "uneven" if choice.trainer_gpus else "-"
    batch = choice.trl
    return f"{batch.per_device_train_batch_size} x {choice.trainer_gpus} x {batch.steps_per_generation}"


def _notes(question: Question, first: Choice) -> list[str]:
    memory = first.memory
    lines = [
        f"an engine's GPU holds {memory.weights:.1f} GiB of weights, {memory.activations:.1f} of activations, "
        f"{memory.graphs:.1f} of CUDA and its graphs, {memory.kv_cache:.1f} of KV cache; a replica's holds "
        f"{memory.kv_tokens:,.0f} tokens"
    ]
    work, processes = question.work, first.trainer_gpus
    if first.trl:
        batch = first.trl
        lines.append(
            f"TRL on {processes} processes: per_device_train_batch_size={batch.per_device_train_batch_size}, "
            f"steps_per_generation={batch.steps_per_generation}, num_generations={work.samples}: "
            f"{batch.per_device_train_batch_size} x {processes} x {batch.steps_per_generation} / {work.samples} = "
            f"{work.prompts} prompts a request"
        )
    elif processes:
        lines.append(
            f"{work.completions} completions cannot be dealt out evenly to {processes} training processes: take a "
            f"multiple of {processes}"
        )
    lines.append("tokens/s are predicted by a model that was fitted to vLLM 0.26 on H200 (docs/plan.md)")
    if processes:
        lines.append(f"training time assumes {question.mfu:g} of the GPU's FLOP/s (--mfu): nothing here was measured")
    return lines
