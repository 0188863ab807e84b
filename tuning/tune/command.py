"""The verb `rollout-gateway tune`."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engines.errors import ConfigError
from gateway.config.load import load
from gateway.config.machine import models_missing, visible_gpus
from tuning.duration import seconds_of
from tuning.plan.options import BATCH, PromptLengths, ResponseLengths, Samples, step_of
from tuning.tune.batch import drawn
from tuning.tune.bench import EngineBench
from tuning.tune.levers import grid
from tuning.tune.report import as_json, configuration, print_outcome
from tuning.tune.search import Tuner


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
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Final runs of start and favoured, in turn.")] = 3,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder for results.")] = Path("tune"),
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts at a time.", rich_help_panel=BATCH)] = 64,
    samples: Samples = 8,
    prompt: PromptLengths = "256:512",
    response: ResponseLengths = "512:2048",
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure settings of an engine on this machine, and write the best as a configuration."""
    found = load(config, context.args)
    name = group or next(iter(found.groups))
    if name not in found.groups or (len(found.groups) > 1 and not group):
        raise ConfigError(f"--group names one of the engine groups: {', '.join(found.groups)}")
    engine = found.groups[name]
    if missing := list(models_missing(found)):
        raise ConfigError("\n".join(missing))
    batch = drawn(step_of(prompts, samples, prompt, response))
    gpus = visible_gpus()
    settings = grid(engine, lever or (), batch.completions, len(gpus))
    budget_s = seconds_of(budget, "--budget")
    out.mkdir(parents=True, exist_ok=True)
    console, began = Console(stderr=True), time.monotonic()

    def report(text: str) -> None:
        line = f"[{time.monotonic() - began:5.0f} of {budget_s:.0f} s] {text}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    report(f"{batch.description}; the start and {len(settings)} settings")
    tuner = Tuner(engine, settings, EngineBench(batch, gpus), budget_s=budget_s, pairs=pairs, report=report)
    outcome = asyncio.run(tuner.run())
    evidence = json.dumps(as_json(outcome), indent=2)
    (out / "best.yaml").write_text(configuration(found, name, config, context.args, outcome), encoding="utf-8")
    (out / "evidence.json").write_text(evidence, encoding="utf-8")
    if as_json_:
        print(evidence)
    else:
        print_outcome(Console(), outcome)
    report(f"{out / 'best.yaml'} is the configuration, {out / 'evidence.json'} the evidence")
