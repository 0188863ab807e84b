"""The results of `tune`: the configuration, and the evidence as a table and as a page with a plot."""

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from engines.config import EngineConfig
from engines.errors import ConfigError
from gateway.config.schema import Config
from gateway.config.sources import Tree, from_file, from_overrides, merge
from tuning.tune.levers import Setting, Value
from tuning.tune.search import Outcome, Record, ratios

_WIDTH_OF_A_PIPE = 200
_BARS = 40
_BAR_PX, _ROW_PX, _WIDTH_PX = 900, 44, 1020
_NO_PAIRS = "<p>None were needed.</p>"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1060px;margin:2rem auto;padding:0 1rem;color:#1c1c1c;background:#fff}
h1{font-size:1.5rem;margin:0} h2{font-size:1.1rem;margin:2rem 0 .5rem} p{margin:.3rem 0}
table{border-collapse:collapse} td,th{padding:.2rem .9rem .2rem 0;text-align:left;vertical-align:top}
td{font-variant-numeric:tabular-nums} .dim{color:#666}
pre{background:#f4f4f4;padding:.8rem;overflow:auto} text{font:13px system-ui,sans-serif;fill:#1c1c1c}
"""


def ranked(outcome: Outcome) -> list[tuple[Setting, Record]]:
    """Return settings and records, fastest first, failures last."""
    return sorted(outcome.records.items(), key=lambda item: -item[1].speed)


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print the evidence and the decision."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_OF_A_PIPE)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("tokens/s", "of the start's", "runs"):
        table.add_column(name, justify="right")
    table.add_column("setting", overflow="fold")
    for speed, share, record, text in _rows(outcome):
        table.add_row(speed, share, str(len(record.speeds)), text)
    console.print(table, markup=False)
    lines = [_decision(outcome), *contributions(outcome)]
    console.print("\n" + "\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def contributions(outcome: Outcome) -> list[str]:
    """Return a line for each lever that the best setting changes, with its own part of the gain.

    The part is from the two measured settings nearest to the best that differ only in this lever.
    """
    return [
        f"{name}={value}: {ratio:.3g} times the tokens/s by itself" if ratio else f"{name}={value}: not measured alone"
        for name, value in outcome.best.changes_from(outcome.start).items()
        for ratio in (_own_ratio(outcome, name, value),)
    ]


def _own_ratio(outcome: Outcome, name: str, value: Value) -> float | None:
    without = dict(outcome.start.values)[name]
    pairs = [
        (len(setting.changes_from(outcome.best)), record.speed / outcome.records[other].speed)
        for setting, record in outcome.records.items()
        if dict(setting.values)[name] == value
        and (other := setting.changed_to(name, without)) in outcome.records
        and record.speed
        and outcome.records[other].speed
    ]
    return min(pairs)[1] if pairs else None


def configuration(config: Config, group: str, file: Path | None, overrides: Sequence[str], outcome: Outcome) -> str:
    """Return the given file and arguments with the best setting in them, as YAML for `up`."""
    tree: Tree = from_file(file).tree if file else {}
    tree = merge(tree, from_overrides(overrides).tree)
    engine = config.groups[group]
    best = outcome.best.applied_to(engine)
    given: Tree = dict(outcome.best.changes_from(outcome.start))
    if best.num_replicas != (replicas := replicas_for(engine, best)):
        given["num_replicas"] = replicas
    for name in ("model", "python"):
        if getattr(engine, name):
            given[name] = getattr(engine, name)  # paths that were found beside the file
    section: Tree = {"engines": {group: given}} if config.engines else {"engine": given}
    tree = merge(tree, section)
    Config.model_validate(tree)
    return f"# By `rollout-gateway tune`: {outcome.reason}.\n" + yaml.safe_dump(tree, sort_keys=False)


def replicas_for(before: EngineConfig, after: EngineConfig) -> int:
    """Return the number of replicas on as many GPUs as before. Raise `ConfigError` where it is not whole."""
    workers = before.num_replicas * before.world_size
    if workers % after.world_size:
        raise ConfigError(
            f"tensor_parallel_size = {after.tensor_parallel_size}: {workers} GPUs of {before.num_replicas} replicas "
            "cannot be dealt out to such engines; leave it out of --lever"
        )
    return workers // after.world_size


def page(outcome: Outcome, workload: str, text: str) -> str:
    """Return one HTML page without external files. `text` is the configuration."""
    against = _html_table(["run", "held against", "best", "ratio"], _pair_rows(outcome.against))
    rows = [
        [speed, share, ", ".join(f"{run:,.0f}" for run in record.speeds), text]
        for speed, share, record, text in _rows(outcome)
    ]
    decision, reason = _decision(outcome).splitlines()
    measured = f"{len(outcome.records)} of {outcome.settings} settings in {outcome.spent_s:.0f} s"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>rollout-gateway tune</title><style>{_STYLE}</style>
<h1>{html.escape(decision[0].upper() + decision[1:])}</h1>
<p>{html.escape("; ".join([reason, *contributions(outcome)]))}</p>
<p class=dim>{html.escape(workload)}. {measured}. The start has {html.escape(str(outcome.start))}.</p>
<h2>Tokens/s of a GPU</h2>{_plot(outcome)}
<h2>Final pairs, in alternating order</h2>
{_html_table(["pair", "start", "fastest", "ratio"], _pair_rows(outcome.pairs)) if outcome.pairs else _NO_PAIRS}
{against if outcome.against else ""}
<h2>All measurements</h2>
{_html_table(["median", "of the start's", "runs", "setting"], rows)}
<h2>Configuration</h2><pre>{html.escape(text)}</pre>
</html>
"""


def _pair_rows(pairs: Sequence[tuple[float, float]]) -> list[list[str]]:
    return [
        [str(index), f"{start:,.0f}", f"{best:,.0f}", f"{best / start:.3f}"]
        for index, (start, best) in enumerate(pairs, start=1)
    ]


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in rows)
    return f"<table><tr>{cells}{body}</table>"


def _plot(outcome: Outcome) -> str:
    """Return a plot with a bar for each setting, a dot for each run, and a line at the start."""
    shown = [(setting, record) for setting, record in ranked(outcome) if record.speed][:_BARS]
    scale = _BAR_PX / max(speed for _, record in shown for speed in record.speeds)
    height = _ROW_PX * len(shown) + 8
    parts = [f'<svg width="{_WIDTH_PX}" height="{height}" viewBox="0 0 {_WIDTH_PX} {height}" role="img">']
    for index, (setting, record) in enumerate(shown):
        top = index * _ROW_PX  # of the label, which has a line of its own, so that none is cut
        colour = "#2a7d4f" if setting == outcome.best else "#8a8a8a" if setting == outcome.start else "#b9cfe4"
        label = html.escape(setting.changes_text(outcome.start))
        parts.append(f'<text x="0" y="{top + 14}">{label}</text>')
        width = record.speed * scale
        parts.append(f'<rect x="0" y="{top + 20}" width="{width:.1f}" height="16" fill="{colour}"/>')
        for speed in record.speeds:
            parts.append(f'<circle cx="{speed * scale:.1f}" cy="{top + 28}" r="3" fill="#1c1c1c"/>')
        parts.append(f'<text x="{_BAR_PX + 12}" y="{top + 33}">{record.speed:,.0f}</text>')
    at = outcome.records[outcome.start].speed * scale
    parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}" stroke="#444" stroke-dasharray="4 3"/>')
    return "".join(parts) + "</svg>"


def _decision(outcome: Outcome) -> str:
    if outcome.best == outcome.start:
        decision = f"keep what you have\n{outcome.reason}"
    else:
        decision = f"take {outcome.best.changes_text(outcome.start)}\n{outcome.reason}"
    if outcome.against_known is not None:
        decision += f"; {outcome.against_known:.3f} times the compared configuration's tokens/s, in the same runs"
    return decision


def _rows(outcome: Outcome) -> Iterator[tuple[str, str, Record, str]]:
    """Yield the median speed of each setting, its share of the start's, its record and its changes."""
    for setting, record in ranked(outcome):
        speed = f"{record.speed:,.0f}" if record.speed else "failed"
        share = f"{record.speed / outcome.records[outcome.start].speed:.3f}" if record.speed else "-"
        failure = f": {record.failure.splitlines()[0]}" if record.failure else ""
        yield speed, share, record, setting.changes_text(outcome.start) + failure


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the decision and its evidence."""
    return {
        "start": dict(outcome.start.values),
        "best": dict(outcome.best.values),
        "changes": outcome.best.changes_from(outcome.start),
        "reason": outcome.reason,
        "pairs": [{"start": start, "fastest": best} for start, best in outcome.pairs],
        "ratios": ratios(outcome.pairs),
        "against": [{"known": known, "best": best} for known, best in outcome.against],
        "against_ratios": ratios(outcome.against),
        "spent_s": outcome.spent_s,
        "settings": outcome.settings,
        "measured": [
            {"setting": dict(setting.values), "speeds": record.speeds, "failure": record.failure}
            for setting, record in ranked(outcome)
        ],
    }
