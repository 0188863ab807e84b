"""The end of a run: prints figures, checks thresholds, writes the report, sets the exit code.

Exit codes: 1 if something failed or nothing was delivered, 3 if a threshold was missed or has no figure.
"""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gevent
import locust
import orjson
from locust import events
from locust.argument_parser import LocustArgumentParser, get_parser
from locust.env import Environment
from locust.runners import WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC

from loadtests.report.cause import causes, late
from loadtests.report.figures import figures, totals
from loadtests.report.page import Report, page
from loadtests.report.thresholds import Threshold, ThresholdError, Verdict, load_thresholds
from loadtests.run import Run, checked

_FAILED, _MISSED = 1, 3
_PROBLEMS_SHOWN = 10
_NOT_TOLD = ("api_key", "configuration", "headless", "csv_prefix", "html_file", "report", "figures", "only_summary")
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
    add("--report", default="", metavar="FILE", help="write one page of HTML about the run")
    add("--figures", default="", metavar="FILE", help="write all figures as JSON")


@events.quitting.add_listener
def conclude(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner):
        return
    run = Run.of(environment)
    found = figures(run.measures, run.phases)
    print(summary(found))
    reasons = causes(found)
    for text in reasons:
        print(text)
    problems = _problems(run, found)
    verdicts, unjudged = _judged(run, found)
    unjudged += [f"INVALID {text}" for text in late(found)]
    for line in (*verdicts, *unjudged):
        print(line)
    if problems:
        environment.process_exit_code = _FAILED
    elif unjudged or not all(verdict.is_met for verdict in verdicts):
        environment.process_exit_code = _MISSED
    if run.settings.figures:
        _write(run.settings.figures, orjson.dumps(found, option=orjson.OPT_INDENT_2))
    if run.settings.report:
        report = Report(
            title=f"Load test: {_scenario(run)}",
            settings=_settings(run),
            figures=found,
            measures=run.measures,
            phases=run.phases,
            verdicts=verdicts,
            problems=[*problems, *unjudged],
            causes=reasons,
        )
        _write(run.settings.report, page(report).encode())
    if run.settings.csv_prefix:
        # Locust's CSV writer polls and skips the end: let it see the last numbers.
        gevent.sleep(1.1 * CSV_STATS_INTERVAL_SEC)


def _write(file: str, content: bytes) -> None:
    """Write a file, and create its folder as Locust does."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def summary(found: Mapping[str, float]) -> str:
    """Return the run in a few lines."""
    lines = [totals(found)]
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


def _problems(run: Run, found: Mapping[str, float]) -> list[str]:
    """Return the problems that fail a run regardless of thresholds."""
    problems = [f"{error.occurrences} x {error.to_name()}" for error in run.environment.stats.errors.values()]
    problems = problems[:_PROBLEMS_SHOWN]
    if found["failures"]:
        problems.insert(0, f"{found['failures']:.0f} failures")
    if not found["completions"]:
        problems.insert(0, "nothing was delivered")
    return problems


def _scenario(run: Run) -> str:
    return ", ".join(Path(file).stem for file in str(run.settings.locustfile).split(","))


def _settings(run: Run) -> dict[str, str]:
    """Return the options that are not default, and the machine."""
    parser = get_parser()
    given = {
        name.replace("_", "-"): str(value)
        for name, value in vars(run.settings).items()
        if name not in _NOT_TOLD and value not in (None, "", parser.get_default(name))
    }
    here = f"{os.cpu_count()} cores, Python {platform.python_version()}, Locust {locust.__version__}"
    return {**given, "load generator": here}
