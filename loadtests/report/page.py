"""A self-contained HTML page about a run: verdict, figures, charts over time."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from loadtests.report.charts import Band, Line, chart, short
from loadtests.report.figures import totals
from loadtests.report.series import Measures, Phase, Series
from loadtests.report.thresholds import Verdict

MEASURES = {
    "makespan_s": "Makespan of a batch, s",
    "tail_ratio": "Tail: makespan / mean completion",
    "session_s": "Session of an agent, s",
    "first_turn_s": "First turn, s",
    "later_turn_s": "Later turn, s",
    "cached_share": "Prompt tokens from the cache, share",
    "ttft_s": "Time to first token, s",
    "tpot_s": "Time per output token, s",
    "longest_gap_s": "Longest wait between chunks, s",
    "completion_s": "Completion, s",
    "completion_tokens": "Tokens of a completion",
    "lateness_s": "Sent later than due, s",
    "update_s": "Weight update, s",
    "failed_s": "Failed after, s",
    "failed_update_s": "Failed weight update after, s",
    "engine_running": "Requests that run in engines",
    "engine_waiting": "Requests that wait in engines",
    "engine_kv": "KV cache in use, share of the fullest",
    "engine_preempted": "Sequences preempted, each second",
    "gateway_queue": "Rollouts that wait in the gateway",
    "replicas_serving": "Replicas that serve",
    "weight_version": "Weight version",
    "watched_mib": "Memory of the watched process, MiB",
    "watched_cores": "Cores of the watched process",
}
# Measures of each second, whose silence says that the server was too busy to answer.
_SAMPLED = ("engine_", "gateway_", "replicas_", "weight_version", "watched_")
_GAP_S = 5
_COLUMNS = ("count", "mean", "p50", "p90", "p95", "p99", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The contents of the page. `settings` are the run's options, `problems` lines about failures."""

    title: str
    settings: Mapping[str, str]
    figures: Mapping[str, float]
    measures: Measures
    phases: Sequence[Phase] = ()
    verdicts: Sequence[Verdict] = ()
    problems: Sequence[str] = ()
    causes: Sequence[str] = ()
    taken: float = field(default_factory=time.time)

    @property
    def passed(self) -> bool:
        return not self.problems and all(verdict.is_met for verdict in self.verdicts)


def page(report: Report) -> str:
    """Return the page."""
    began = report.measures.began
    taken = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(report.taken))
    parts = [
        f"<h1>{escape(report.title)}</h1><p class='quiet'>{taken}, {escape(totals(report.figures))}</p>",
        _verdict(report),
        _listed("What it waited for", report.causes),
        _over_time(report, began),
        _table(report.measures.total()),
        *(_phase(report, phase) for phase in report.phases),
        _settings(report.settings),
    ]
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(report.title)}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _verdict(report: Report) -> str:
    # A run without a threshold was held to nothing that it could pass.
    word = "Failed" if not report.passed else "Passed" if report.verdicts else "Ended"
    lines = [f"<li class='missed'>{escape(problem)}</li>" for problem in report.problems]
    for verdict in report.verdicts:
        lines.append(f"<li class='{'met' if verdict.is_met else 'missed'}'>{escape(str(verdict))}</li>")
    listed = (
        f"<ul>{''.join(lines)}</ul>" if lines else "<p class='quiet'>No threshold was given, and nothing failed.</p>"
    )
    return f"<section class='verdict {word.lower()}'><h2>{word}</h2>{listed}</section>"


def _listed(heading: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f"<h2>{escape(heading)}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _over_time(report: Report, began: float) -> str:
    windows, width = report.measures.windows(), report.measures.width_s
    seconds = max(report.measures.seconds, width)
    bands = [Band(phase.name, phase.began - began, phase.ended - began) for phase in report.phases]
    marks = [start + width / 2 - began for start, named in windows for _ in range(_count(named, "update_s"))]

    def line(label: str, name: str, share: float | None, style: int) -> Line:
        """Return a percentile per window; sums per second if `share` is None."""
        points = []
        for start, named in windows:
            at = start + width / 2 - began
            if share is None:
                points.append((at, named[name].sum / width if name in named else 0.0))
            elif name in named:
                points.append((at, named[name].percentile(share)))
        is_sampled = name.startswith(_SAMPLED)
        return Line(label, points, style, max(_GAP_S, 3 * width) if is_sampled else math.inf)

    total = report.measures.total()
    charts = [("Tokens/s", [line("tokens/s", "tokens", None, 0)])]
    for name in ("makespan_s", "ttft_s", "tpot_s", "completion_s", "lateness_s"):
        if name in total:
            charts.append((MEASURES[name], [line("p99", name, 0.99, 1), line("p50", name, 0.5, 0)]))
    if "engine_running" in total:
        waiting = [line("waiting", "engine_waiting", 0.5, 1), line("running", "engine_running", 0.5, 0)]
        charts.append(("Requests in engines", waiting))
    for name in ("engine_kv", "gateway_queue", "replicas_serving", "weight_version", "watched_mib"):
        if name in total:
            charts.append((MEASURES[name], [line(name, name, 0.5, 0)]))
    note = " Dashed lines are weight updates." if marks else ""
    drawn = (
        f"<figure><figcaption>{escape(label)}{_legend(lines)}</figcaption>"
        f"{chart(lines, seconds, bands, marks)}</figure>"
        for label, lines in charts
    )
    head = f"<h2>Over time</h2><p class='quiet'>Each point is {width} s.{note}</p>"
    return f"{head}<div class='charts'>{''.join(drawn)}</div>"


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) == 1:
        return ""
    return "".join(f"<span class='key{line.style}'>{escape(line.name)}</span>" for line in lines)


def _table(named: Mapping[str, Series], heading: str = "All of it") -> str:
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    rows = []
    for name, label in MEASURES.items():
        if _count(named, name):
            found = named[name].summary()
            cells = "".join(f"<td>{short(found[column])}</td>" for column in _COLUMNS)
            rows.append(f"<tr><th title='{name}'>{escape(label)}</th>{cells}</tr>")
    return f"<h2>{escape(heading)}</h2><div class='wide'><table><tr><th></th>{head}</tr>{''.join(rows)}</table></div>"


def _phase(report: Report, phase: Phase) -> str:
    named = report.measures.between(phase.began, phase.ended)
    return _table(named, f"{phase.name}: {short(report.figures[f'{phase.name}.tokens_per_s'])} tokens/s")


def _settings(settings: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in settings.items())
    return f"<h2>What was asked for</h2><div class='wide'><table class='settings'>{rows}</table></div>"


def _count(named: Mapping[str, Series], name: str) -> int:
    return named[name].count if name in named else 0


_STYLE = """
:root { --ground: #fbfbfa; --card: #fff; --ink: #1d2129; --quiet: #667085; --rule: #e4e7ec; --good: #157f3c;
  --bad: #b42318; --one: #2457c5; --two: #d9822b; --shade: #f2f4f7; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --card: #1c2027; --ink: #e6e9ee; --quiet: #98a2b3;
  --rule: #2d333d; --good: #4cc38a; --bad: #ff7b72; --one: #7aa2f7; --two: #f0a35e; --shade: #22272f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 17px; margin: 32px 0 8px; } p { margin: 4px 0; }
.quiet { color: var(--quiet); }
.verdict { margin-top: 20px; padding: 12px 18px; background: var(--card); border: 1px solid var(--rule);
  border-left: 5px solid var(--good); border-radius: 8px; }
.verdict.failed { border-left-color: var(--bad); } .verdict h2 { margin: 0; color: var(--good); }
.verdict.failed h2, .missed { color: var(--bad); }
.verdict ul { list-style: none; margin: 6px 0 0; padding: 0; }
.verdict li { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 16px; margin-top: 8px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px; }
figcaption { font-weight: 600; margin-bottom: 4px; }
figcaption span { float: right; margin-left: 12px; font-weight: 400; }
.key0 { color: var(--one); } .key1 { color: var(--two); }
svg { width: 100%; display: block; } svg text { fill: var(--quiet); font-size: 12px; }
svg .left { text-anchor: end; } svg .below, svg .band { text-anchor: middle; }
.grid { stroke: var(--rule); } .mark { stroke: var(--good); stroke-dasharray: 3 4; }
rect.band0 { fill: var(--shade); } rect.band1 { fill: none; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line0 { stroke: var(--one); } .line1 { stroke: var(--two); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; background: var(--card);
  border: 1px solid var(--rule); font-variant-numeric: tabular-nums; }
th, td { padding: 6px 12px; border-top: 1px solid var(--rule); text-align: right; font-weight: 400; }
tr > th:first-child { text-align: left; } tr:first-child th { color: var(--quiet); border-top: 0; font-size: 13px; }
table.settings td { text-align: left; } table.settings th { color: var(--quiet); width: 240px; font-size: inherit; }
@media print { figure, table { break-inside: avoid; } }
@media (max-width: 480px) { .charts { grid-template-columns: 1fr; } }
"""
