"""The verb `rollout-gateway tune`."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engines.config import EngineConfig
from engines.errors import ConfigError
from gateway.config.load import load
from gateway.config.node_gpus import read_gpus, visible_gpus
from tuning.duration import seconds_of
from tuning.plan.options import BATCH, PromptLengths, ResponseLengths, Samples, step_of
from tuning.tune.batch import Batch, drawn, recorded
from tuning.tune.bench import EngineBench
from tuning.tune.journal import NOT_THE_SUBJECT, Journal
from tuning.tune.levers import Lever, expected_of, levers_of
from tuning.tune.report import as_json, configuration, page, print_outcome, replicas_for
from tuning.tune.search import Outcome, Tuner

_PROMPTS = 64


def tune_command(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="The configuration to start from.")
    ] = None,
    group: Annotated[str, typer.Option("--group", help="Engine group, where there are several.")] = "",
    budget: Annotated[str, typer.Option("--budget", help="Longest in all, such as 90s, 45m or 2h.")] = "30m",
    lever: Annotated[
        list[str] | None,
        typer.Option("--lever", metavar="NAME=VALUE,...", help="Try these values alone. Again for more levers."),
    ] = None,
    gpu_ids: Annotated[str, typer.Option("--gpus", metavar="0,1", help="GPUs to measure on; all unless given.")] = "",
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Final runs of start and best, in turn.")] = 3,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="FILE", help="A configuration to compare the best with, in turn."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FOLDER", help="Folder for results. A run that was cut short resumes from it."),
    ] = Path("tune"),
    workload: Annotated[
        Path | None,
        typer.Option("--workload", metavar="FILE", help="A trace, or JSON lines.", rich_help_panel=BATCH),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(
            "--prompts", min=1, help="Prompts at a time for each GPU; 64, or all recorded.", rich_help_panel=BATCH
        ),
    ] = None,
    samples: Samples = 8,
    prompt: PromptLengths = "256:512",
    response: ResponseLengths = "512:2048",
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure settings of an engine on this machine, and write the best as a configuration."""
    found = load(config, context.args)
    name = found.chosen_group(group)
    engine = found.groups[name]
    batch = recorded(workload, prompts) if workload else drawn(step_of(prompts or _PROMPTS, samples, prompt, response))
    gpus = list(read_gpus(gpu_ids)) if gpu_ids else visible_gpus()
    levers = levers_of(engine, lever or (), batch.completions, len(gpus))
    for value in next((found.values for found in levers if found.name == "tensor_parallel_size"), ()):
        replicas_for(engine, engine.model_copy(update={"tensor_parallel_size": value}))
    budget_s = seconds_of(budget, "--budget")
    journal = Journal(out / "journal.jsonl", _subject(engine, levers, batch))
    known = _known(against, name, engine) if against else None
    outcome = asyncio.run(_tune(engine, levers, batch, EngineBench(batch, gpus), journal, budget_s, pairs, known))
    text = configuration(found, name, config, context.args, outcome)
    (out / "best.yaml").write_text(text, encoding="utf-8")
    (out / "report.html").write_text(page(outcome, batch.description, text), encoding="utf-8")
    if as_json_:
        print(json.dumps(as_json(outcome), indent=2))
    else:
        print_outcome(Console(), outcome)
    Console(stderr=True).print(
        f"{out / 'best.yaml'} is the configuration, {out / 'report.html'} the evidence", markup=False, soft_wrap=True
    )


async def _tune(
    engine: EngineConfig,
    levers: list[Lever],
    batch: Batch,
    bench: EngineBench,
    journal: Journal,
    budget_s: float,
    pairs: int,
    known: EngineConfig | None,
) -> Outcome:
    console, began = Console(stderr=True), time.monotonic() - journal.spent_s

    def report(text: str) -> None:
        line = f"[{time.monotonic() - began:5.0f} of {budget_s:.0f} s] {text}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    report(f"{batch.description}; " + ", ".join(f"{lever.name} {len(lever.values)}" for lever in levers))
    expected = expected_of(engine, levers, batch.completions)
    tuner = Tuner(
        engine, levers, bench, journal, budget_s=budget_s, pairs=pairs, report=report, expected=expected, against=known
    )
    return await tuner.run()


def _subject(engine: EngineConfig, levers: list[Lever], batch: Batch) -> dict[str, object]:
    """Return the subject of a journal: engine, levers and workload."""
    dumped = engine.model_dump(mode="json", exclude=NOT_THE_SUBJECT)
    return {"engine": dumped, "levers": {lever.name: lever.values for lever in levers}, "workload": batch.digest}


def _known(file: Path, name: str, engine: EngineConfig) -> EngineConfig:
    """Return the group of the same name, or the only group, of another file."""
    found = load(file)
    known = found.groups[name if name in found.groups else found.chosen_group("")]
    if (known.kind, known.model) != (engine.kind, engine.model):
        raise ConfigError(
            f"--against {str(file)!r}: it runs {known.kind} with {known.model!r}, and this is {engine.kind} with "
            f"{engine.model!r}; compare engines of the same kind and model"
        )
    return known
