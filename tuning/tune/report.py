"""The results of `tune`: the configuration, and the evidence as a table and as JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from gateway.config.load import collected
from gateway.config.schema import Config
from tuning.tune.levers import text_of
from tuning.tune.search import Outcome


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print the settings, fastest first, and the decision."""
    start = outcome.records[0].speed
    lines = [f"{'tokens/s':>10}  of the start's  setting"]
    for record in sorted(outcome.records, key=lambda record: -record.speed):
        speed = f"{record.speed:>10,.0f}  {record.speed / start:>14.3f}" if record.speed else f"{'failed':>10}{'-':>16}"
        failure = f": {record.failure.splitlines()[0]}" if record.failure else ""
        lines.append(f"{speed}  {text_of(record.setting)}{failure}")
    if outcome.untried:
        lines.append(f"{outcome.untried} settings were not tried: --budget")
    lines += ["", f"take {text_of(outcome.best)}" if outcome.best else "keep what you have", outcome.reason]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def configuration(config: Config, group: str, file: Path | None, overrides: Sequence[str], outcome: Outcome) -> str:
    """Return the given file and arguments with the best setting in them, as YAML for `up`."""
    engine = config.groups[group]
    given = dict(outcome.best)
    for name in ("model", "python"):
        if getattr(engine, name):
            given[name] = getattr(engine, name)  # paths that were found beside the file
    found = collected(file, overrides, {})
    found.put(("engines", group) if config.engines else ("engine",), given, "default", "")
    Config.model_validate(found.tree)
    return f"# By `rollout-gateway tune`: {outcome.reason}.\n" + yaml.safe_dump(found.tree, sort_keys=False)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the decision and its evidence."""
    return {
        "best": dict(outcome.best),
        "favoured": dict(outcome.favoured),
        "reason": outcome.reason,
        "pairs": [{"start": start, "favoured": favoured} for start, favoured in outcome.pairs],
        "spent_s": outcome.spent_s,
        "untried": outcome.untried,
        "measured": [
            {"setting": dict(record.setting), "speeds": record.speeds, "failure": record.failure}
            for record in outcome.records
        ],
    }
