"""The end of a run: prints figures and verdicts, writes the figures, sets the exit code.

Figures have the names used in thresholds: `tokens_per_s`, `ttft_s.p99`.

Exit codes: 1 if something failed or nothing was delivered, 3 if a threshold was missed or has no figure.
"""

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

from loadtests.report.cause import causes, late
from loadtests.report.series import Measures
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
    found = figures(run.measures)
    print(summary(found))
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


def figures(measures: Measures) -> dict[str, float]:
    """Return all figures of a run."""
    named, seconds = measures.series, measures.seconds

    def count(name: str) -> int:
        return named[name].count if name in named else 0

    found = {
        "seconds": seconds,
        "completions": float(count("completion_s")),
        "failures": float(count("failed_s") + count("failed_update_s")),
        "tokens_per_s": named["tokens"].sum / seconds if seconds > 0 else 0.0,
    }
    for name, series in named.items():
        found |= {f"{name}.{statistic}": value for statistic, value in series.summary().items()}
    return found


def summary(found: Mapping[str, float]) -> str:
    """Return the run in a few lines."""
    counts = f"{found['completions']:.0f} completions, {found['failures']:.0f} failures"
    lines = [f"{counts}, {found['tokens_per_s']:.0f} tokens/s over {found['seconds']:.1f} s"]
    for name in _SHOWN:
        if f"{name}.p50" in found:
            values = ", ".join(f"{part} {found[f'{name}.{part}']:.4g}" for part in ("p50", "p95", "p99", "max"))
            lines.append(f"{name:<14} {values}")
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
