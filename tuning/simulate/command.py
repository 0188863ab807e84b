"""The verb `rollout-gateway simulate`."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engines.errors import ConfigError
from gateway.config.load import load
from gateway.config.schema import Config
from tuning.doctor.model_size import model_shape
from tuning.plan.gpu import gpu_of
from tuning.plan.options import PromptLengths, ResponseLengths, Samples
from tuning.plan.shape import read_shape
from tuning.plan.workload import Lengths
from tuning.simulate import options
from tuning.simulate.pool import Pool
from tuning.simulate.report import as_json, print_outcomes
from tuning.simulate.speed import Speed, speed_of
from tuning.simulate.workloads.agents import Agents
from tuning.simulate.workloads.grpo import Grpo
from tuning.simulate.workloads.lengths import LogNormal
from tuning.simulate.workloads.recorded import Recorded

_AS_CONFIGURED, _NO_LENGTHS, _ROUND_ROBIN = "as configured", "lengths unknown", "round robin"
_KINDS = {"grpo": ("grpo",), "agents": ("agents",), "mixed": ("grpo", "agents")}
_WITH_EPOCHS = ("grpo", "mixed")


def simulate_command(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML or TOML file, or a Serve document.")
    ] = None,
    workload: Annotated[
        str,
        typer.Option("--workload", metavar="KIND|FILE", help="grpo, agents, mixed (both at once), or a trace's file."),
    ] = "grpo",
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against", metavar="'KEY=VALUE ...'", help="Run with these keys changed, too. Again for another run."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Workloads drawn; every run has the same.")] = 5,
    gpu: options.Gpu = "H200",
    shape: options.Shape = "",
    kv_read_s: options.KvRead = 0.0,
    prompts: options.Prompts = 128,
    samples: Samples = 8,
    prompt: PromptLengths = "512:1024",
    response: ResponseLengths = "2048:32768",
    sigma: options.Sigma = 1.0,
    batches: options.Batches = 2,
    epochs: options.Epochs = 2,
    pool: options.Pool = 0,
    max_staleness: options.MaxStaleness = 0,
    sessions: options.Sessions = 64,
    rounds: options.Rounds = 3,
    turns: options.Turns = 10,
    first: options.First = "2000:8000",
    turn: options.Turn = "300:2000",
    tool: options.Tool = "1500:8000",
    tool_s: options.ToolSeconds = 5.0,
    max_context: options.MaxContext = 32768,
    finish: options.ReportsEnds = False,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON, with each seed's figures.")] = False,
) -> None:
    """Run a workload through the gateway's scheduler in virtual time, beside other placements. Starts nothing."""
    # The scheduler runs on the `serve` extra, which other commands do without.
    try:
        from tuning.simulate.placements import by_the_gateway, in_turn, without_lengths
        from tuning.simulate.runs import Run, Source, outcomes
    except ImportError as error:
        raise ConfigError(f"simulate: {error}: pip install 'rollout-gateway[serve]'") from error

    def lengths(text: str, option: str) -> LogNormal:
        return LogNormal(Lengths.parse(text, option), sigma)

    def run(changes: Sequence[str] = ()) -> Run:
        found = load(config, [*context.args, *changes])
        return Run(found, _speeds(found, gpu, shape, kv_read_s), by_the_gateway)

    runs = {_AS_CONFIGURED: run()} | {changes: run(shlex.split(changes)) for changes in against or ()}
    given = runs[_AS_CONFIGURED]
    if workload in _WITH_EPOCHS and epochs > 1:
        runs[_NO_LENGTHS] = Run(given.config, given.speeds, without_lengths)
    if pool or max_staleness:
        _check_pool(pool, max_staleness, prompts, workload)
        runs[f"pool of {pool}"] = Run(given.config, given.speeds, by_the_gateway, Pool(pool, max_staleness))
    runs[_ROUND_ROBIN] = Run(given.config, given.speeds, in_turn)
    drawn: dict[str, Source] = {
        "grpo": Grpo(
            prompts=prompts,
            samples=samples,
            batches=batches,
            epochs=epochs,
            prompt=lengths(prompt, "--prompt"),
            response=lengths(response, "--response"),
        ),
        "agents": Agents(
            users=sessions * sum(given.config.groups[group].num_replicas for group in given.speeds),
            rounds=rounds,
            turns=turns,
            first=lengths(first, "--first"),
            response=lengths(turn, "--turn"),
            tool=lengths(tool, "--tool"),
            tool_s=tool_s,
            max_context=max_context,
            reports_ends=finish,
        ),
    }
    sources = [drawn[kind] for kind in _KINDS[workload]] if workload in _KINDS else [_recorded(workload)]
    with Console(stderr=True).status("") as status:
        found = outcomes(runs, sources, seeds if workload in _KINDS else 1, status.update)
    if as_json_:
        print(json.dumps(as_json(found), indent=2))
    else:
        print_outcomes(Console(), found)


def _check_pool(pool: int, max_staleness: int, prompts: int, workload: str) -> None:
    if not pool:
        raise ConfigError(f"--max-staleness {max_staleness} is of a --pool, which is not given")
    if workload != "grpo":
        raise ConfigError(f"--pool {pool}: only the workload grpo has batches out of a pool, not {workload}")
    if pool < prompts:
        raise ConfigError(f"--pool {pool} is less than the {prompts} --prompts that a batch takes out of it")


def _recorded(workload: str) -> Recorded:
    if not Path(workload).is_file():
        raise ConfigError(f"--workload {workload!r}: expected {', '.join(_KINDS)}, or the file of a gateway's trace")
    return Recorded.read(Path(workload))


def _speeds(config: Config, gpu: str, shape: str, kv_read_s: float) -> dict[str, Speed]:
    """Return the speed of each engine group of the policy; of all groups where each is frozen."""
    given = read_shape(None, shape.split(",")) if shape else None
    groups = {name: group for name, group in config.groups.items() if not group.frozen} or config.groups
    return {
        name: speed_of(name, group, gpu_of(gpu), given or model_shape(group.model), kv_read_s)
        for name, group in groups.items()
    }
