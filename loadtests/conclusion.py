"""How a run ends: its figures printed, its thresholds judged, its report written, its exit code set.

Exit codes: 1 where something failed or nothing was delivered, 3 where a threshold was missed or could not be judged.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gevent
import orjson
from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC

from loadtests.figures import figures
from loadtests.run import Run
from loadtests.thresholds import ThresholdError, Verdict, load_thresholds

_FAILED, _MISSED = 1, 3
_SHOWN = ("makespan_s", "tail_ratio", "session_s", "ttft_s", "tpot_s", "completion_s", "lateness_s", "update_s")


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add("--thresholds", default="", metavar="FILE", help="YAML with bounds of figures; one that is missed ends with 3")
    add("--figures", default="", metavar="FILE", help="write all figures as JSON")


@events.init.add_listener
def refuse_what_cannot_be_judged(environment: Environment, **_: Any) -> None:
    """Now, and not after an hour."""
    settings = environment.parsed_options
    if settings is not None and settings.thresholds:
        try:
            load_thresholds(Path(settings.thresholds))
        except ThresholdError as error:
            print(error, file=sys.stderr)
            sys.exit(_MISSED)


@events.quitting.add_listener
def conclude(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner):
        return
    run = Run.of(environment)
    found = figures(run.measures, run.phases)
    print(summary(found))
    missed = _judge(run, found)
    if run.settings.figures:
        Path(run.settings.figures).write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    if found["failures"] or not found["completions"]:
        environment.process_exit_code = _FAILED
    elif missed:
        environment.process_exit_code = _MISSED
    if run.settings.csv_prefix:
        # The writer of the CSV files looks at the numbers once in a while and not at the end: let it see the last ones.
        gevent.sleep(1.1 * CSV_STATS_INTERVAL_SEC)


def summary(found: Mapping[str, float]) -> str:
    """The run in a few lines."""
    counts = f"{found['completions']:.0f} completions, {found['failures']:.0f} failures"
    lines = [f"{counts}, {found['tokens_per_s']:.0f} tokens/s over {found['seconds']:.1f} s"]
    for name in _SHOWN:
        if f"{name}.p50" in found:
            values = ", ".join(f"{part} {found[f'{name}.{part}']:.4g}" for part in ("p50", "p95", "p99", "max"))
            lines.append(f"{name:<14} {values}")
    return "\n".join(lines)


def _judge(run: Run, found: Mapping[str, float]) -> bool:
    """Whether a threshold was missed. One line for each."""
    missed = False
    for threshold in load_thresholds(Path(run.settings.thresholds)) if run.settings.thresholds else []:
        try:
            verdict: Verdict = threshold.judge(found)
        except ThresholdError as error:
            print(f"MISSED  {error}")
            missed = True
            continue
        print(verdict)
        missed = missed or not verdict.is_met
    return missed
