"""The end of a run: prints figures and verdicts, writes the figures, sets the exit code.

Exit codes: 1 if something failed or nothing was delivered, 3 if a threshold was missed or has no figure.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gevent
import orjson
from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC

from loadtests.report.cause import causes, late
from loadtests.report.figures import figures, totals
from loadtests.report.series import Phase
from loadtests.report.thresholds import Threshold, ThresholdError, Verdict, load_thresholds
from loadtests.run import Run, checked

_FAILED, _MISSED = 1, 3
_SHOWN = ("makespan_s", "tail_ratio", "session_s", "ttft_s", "tpot_s", "completion_s", "lateness_s", "update_s")


def _read(path: str) -> list[Threshold]:
    return load_thresholds(Path(path))


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--thresholds",
        type=checked(_read),
        metavar="FILE",
        help="YAML with bounds of figures; a missed bound exits with 3",
    )
    add("--figures", default="", metavar="FILE", help="write all figures as JSON")


@events.quitting.add_listener
def conclude(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner):
        return
    run = Run.of(environment)
    found = figures(run.measures, run.phases)
    print(summary(found, run.phases))
    for text in causes(found):
        print(text)
    verdicts, unjudged = _judged(run, found)
    unjudged += [f"INVALID {text}" for text in late(found)]
    for line in (*verdicts, *unjudged):
        print(line)
    if found["failures"] or not found["completions"] or environment.stats.errors:
        environment.process_exit_code = _FAILED
    elif unjudged or not all(verdict.is_met for verdict in verdicts):
        environment.process_exit_code = _MISSED
    if run.settings.figures:
        path = Path(run.settings.figures)
        path.parent.mkdir(parents=True, exist_ok=True)  # as Locust does for its own files
        path.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    if run.settings.csv_prefix:
        # Locust's CSV writer polls and skips the end: let it see the last numbers.
        gevent.sleep(1.1 * CSV_STATS_INTERVAL_SEC)


def summary(found: Mapping[str, float], phases: Sequence[Phase] = ()) -> str:
    """Return the run in a few lines, and the speed of each phase."""
    lines = [totals(found)]
    for name in _SHOWN:
        if f"{name}.p50" in found:
            values = ", ".join(f"{part} {found[f'{name}.{part}']:.4g}" for part in ("p50", "p95", "p99", "max"))
            lines.append(f"{name:<14} {values}")
    for phase in phases:
        first, last = (found.get(f"{phase.name}.ttft_s.{part}", 0.0) for part in ("p50", "p99"))
        rate = found[f"{phase.name}.tokens_per_s"]
        lines.append(f"{phase.name:<14} {rate:.0f} tokens/s, ttft_s p50 {first:.4g}, p99 {last:.4g}")
    return "\n".join(lines)


def _judged(run: Run, found: Mapping[str, float]) -> tuple[list[Verdict], list[str]]:
    """Return a verdict per threshold, and a line per threshold without a figure."""
    verdicts: list[Verdict] = []
    unjudged = []
    for threshold in _read(run.settings.thresholds) if run.settings.thresholds else []:
        try:
            verdicts.append(threshold.judge(found))
        except ThresholdError as error:
            unjudged.append(f"MISSED  {error}")
    return verdicts, unjudged
