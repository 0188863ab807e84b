"""The verb `rollout-gateway plan`."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engines.errors import ConfigError, UsageError
from gateway.config.load import load
from tuning.plan.choices import Choice, best_of_each, ranked
from tuning.plan.gpu import gpu_of
from tuning.plan.options import BATCH, PromptLengths, ResponseLengths, Samples, step_of
from tuning.plan.question import Question
from tuning.plan.report import as_json, configuration, print_plan
from tuning.plan.shape import read_shape
from tuning.plan.speed import fitted

# A shape that needs no file, of Qwen2-7B.
EXAMPLE_SHAPE = (
    "num_hidden_layers=28,hidden_size=3584,num_attention_heads=28,num_key_value_heads=4,intermediate_size=18944,"
    "vocab_size=152064"
)


def plan_command(
    model: Annotated[Path | None, typer.Option("--model", "-m", metavar="FOLDER", help="Checkpoint or its id.")] = None,
    shape: Annotated[
        str, typer.Option("--shape", metavar="KEY=VALUE,...", help="Override fields of config.json.")
    ] = "",
    gpu: Annotated[str, typer.Option("--gpu", help="H100, ..., or memory_gib=...,tb_per_s=...")] = "H200",
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of a node, trainer's included.")] = 8,
    nodes: Annotated[int, typer.Option("--nodes", help="Nodes of so many GPUs.")] = 1,
    cpu_factor: Annotated[float, typer.Option("--cpu-factor", help="Slowness of CPU cores; slow clouds: 1.6.")] = 1.0,
    trainer_gpus: Annotated[int | None, typer.Option("--trainer-gpus", help="GPUs that train; all splits.")] = None,
    colocated: Annotated[bool, typer.Option("--colocated", help="Trainer and engines take turns on all GPUs.")] = False,
    lora: Annotated[int, typer.Option("--lora", metavar="RANK", help="Train adapters of this rank alone.")] = 0,
    prompts: Annotated[int, typer.Option("--prompts", help="Prompts of a step.", rich_help_panel=BATCH)] = 128,
    samples: Samples = 8,
    prompt: PromptLengths = "512:1024",
    response: ResponseLengths = "1024:4096",
    mfu: Annotated[float, typer.Option("--mfu", help="Share of the GPU's FLOP/s that training reaches.")] = 0.4,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows of the table.")] = 12,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write the first choice as a configuration.")
    ] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON, with all choices.")] = False,
) -> None:
    """Plan the GPUs of trainer and engines: splits that fit, and their expected speed. Starts nothing."""
    if model is None and not shape:
        raise UsageError(
            f"nothing to plan for: give --model FOLDER, or numbers of its config.json: --shape {EXAMPLE_SHAPE}"
        )
    if write is not None and colocated:
        raise UsageError(
            "--write with --colocated: colocated engines are the trainer's own and take no file of ours; leave out "
            "--write, and give verl the overrides that are printed"
        )
    question = Question(
        shape=read_shape(model, shape.split(",") if shape else ()),
        gpu=gpu_of(gpu),
        gpus=gpus,
        nodes=nodes,
        work=step_of(prompts, samples, prompt, response),
        speeds=fitted(),
        trainer_gpus=trainer_gpus,
        is_colocated=colocated,
        lora_rank=lora,
        mfu=mfu,
        cpu_factor=cpu_factor,
    )
    choices = ranked(question)
    if as_json_:
        print(json.dumps(as_json(question, choices), indent=2))
    else:
        print_plan(Console(), question, best_of_each(choices)[:top])
    if write is not None:
        _write(write, configuration(question, _deployable(question, choices), _checkpoint(model)))


def _deployable(question: Question, choices: Sequence[Choice]) -> Choice:
    """The first choice whose replicas Ray Serve can place."""
    for choice in choices:
        if not choice.layout.spans_nodes(question.gpus):
            return choice
    raise ConfigError(
        f"--write: every engine that fits spans nodes of {question.gpus} GPUs, and a replica is on one; start such an "
        "engine yourself, and give its URL to a group of kind: external"
    )


def _checkpoint(model: Path | None) -> str:
    if model is None:
        raise UsageError("--write: a configuration needs the checkpoint that engines load: give --model FOLDER")
    if not model.exists():
        return str(model)  # an id, in the Hugging Face cache
    return os.path.abspath(model if model.is_dir() else model.parent)


def _write(file: Path, text: str) -> None:
    """Write the configuration, and report what `up` still needs."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {str(file)!r}: {error.strerror}") from error
    try:
        load(file)
    except ConfigError as error:
        print(f"{file} is written, and not ready yet: {error}", file=sys.stderr)
    else:
        print(f"{file} is ready: rollout-gateway up -c {file}", file=sys.stderr)
