"""Findings as a table of at most 100 columns, or as plain lines where the output is no terminal."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tuning.doctor.finding import Finding, Severity

_WIDTH = 100
_STYLES = {Severity.HURTS: "bold red", Severity.CONSIDER: "yellow", Severity.FINE: "green"}


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"counts": counts(findings), "findings": [asdict(finding) for finding in findings]}


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    return {severity.value: sum(finding.severity is severity for finding in findings) for severity in Severity}


def print_findings(console: Console, findings: Sequence[Finding], *, with_fine: bool) -> None:
    """Print findings. Fine findings are counted, and shown `with_fine` or where they correct a common belief.

    Advice that holds for nearly every file takes one line.
    """
    general = [] if with_fine else [finding for finding in findings if finding.is_general]
    named = [finding for finding in findings if finding not in general]
    shown = [finding for finding in named if with_fine or finding.severity is not Severity.FINE or finding.corrects]
    if console.is_terminal:
        _print_table(console, shown)
    else:
        for finding in shown:
            console.print("\n".join(_lines(finding)) + "\n", markup=False, highlight=False, soft_wrap=True)
    if general:
        keys = ", ".join(dict.fromkeys(f"{finding.key}: {finding.suggestion.partition(';')[0]}" for finding in general))
        console.print(
            f"worth a try in most runs (--all says why): {keys}\n", markup=False, highlight=False, soft_wrap=True
        )
    found = counts(findings)
    rest = "" if with_fine or not found["fine"] else " (--all shows them)"
    line = f"{found['hurts']} that hurt, {found['consider']} to consider, {found['fine']} fine{rest}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_table(console: Console, findings: Sequence[Finding]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", show_lines=False, padding=(0, 2, 1, 0))
    table.width = min(_WIDTH, console.width)
    table.add_column("", width=8)
    table.add_column("value", ratio=2, overflow="fold")
    table.add_column("finding", ratio=3, overflow="fold")
    for finding in findings:
        value = Text(f"{_name(finding)}{_value(finding)}", "bold")
        value.append(f"\n{_origin(finding)}", "dim")
        details = Text(finding.message)
        for label, text in _details(finding):
            details.append(f"\n{label}: ", "dim")
            details.append(text)
        table.add_row(Text(finding.severity.value, _STYLES[finding.severity]), value, details)
    console.print(table)


def _lines(finding: Finding) -> list[str]:
    value = f"{_name(finding)}{_value(finding)} ({_origin(finding)})"
    head = f"{finding.severity.value}: {finding.where}: {value}: {finding.message}"
    return [head, *(f"  {label}: {text}" for label, text in _details(finding))]


def _details(finding: Finding) -> list[tuple[str, str]]:
    if finding.severity is Severity.FINE:
        details = {"wrong is": finding.corrects, "source": finding.source if finding.corrects else ""}
    else:
        details = {
            "why": finding.why,
            "set": finding.suggestion,
            "effect": finding.effect,
            "wrong is": finding.corrects,
            "source": finding.source,
        }
    return [(label, text) for label, text in details.items() if text]


def _name(finding: Finding) -> str:
    return finding.key or finding.rule


def _value(finding: Finding) -> str:
    return f" = {json.dumps(finding.value)}" if finding.key else ""


def _origin(finding: Finding) -> str:
    return finding.place or (finding.origin if finding.origin else "not given")
