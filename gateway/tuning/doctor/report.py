"""Findings as a table of at most 100 columns, or as plain lines where the output is no terminal."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.tuning.doctor.finding import Finding, Severity

_WIDTH = 100
_STYLES = {Severity.HURTS: "bold red", Severity.CONSIDER: "yellow", Severity.FINE: "green"}


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"counts": counts(findings), "findings": [asdict(finding) for finding in findings]}


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    return {severity.value: sum(one.severity is severity for one in findings) for severity in Severity}


def print_findings(console: Console, findings: Sequence[Finding], *, with_fine: bool) -> None:
    """Prints findings; fine ones are counted, and shown `with_fine` or where they correct a common belief. Advice that
    holds for nearly every file takes one line."""
    general = [] if with_fine else [one for one in findings if one.is_general]
    named = [one for one in findings if one not in general]
    shown = [one for one in named if with_fine or one.severity is not Severity.FINE or one.corrects]
    if console.is_terminal:
        _print_table(console, shown)
    else:
        for one in shown:
            console.print("\n".join(_lines(one)) + "\n", markup=False, highlight=False, soft_wrap=True)
    if general:
        keys = ", ".join(dict.fromkeys(f"{one.key}: {one.suggestion.partition(';')[0]}" for one in general))
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
    for one in findings:
        value = Text(f"{_name(one)}{_value(one)}", "bold")
        value.append(f"\n{_origin(one)}", "dim")
        told = Text(one.message)
        for label, text in _details(one):
            told.append(f"\n{label}: ", "dim")
            told.append(text)
        table.add_row(Text(one.severity.value, _STYLES[one.severity]), value, told)
    console.print(table)


def _lines(one: Finding) -> list[str]:
    head = f"{one.severity.value}: {one.where}: {_name(one)}{_value(one)} ({_origin(one)}): {one.message}"
    return [head, *(f"  {label}: {text}" for label, text in _details(one))]


def _details(one: Finding) -> list[tuple[str, str]]:
    if one.severity is Severity.FINE:
        told = {"wrong is": one.corrects, "source": one.source if one.corrects else ""}
    else:
        told = {
            "why": one.why,
            "set": one.suggestion,
            "effect": one.effect,
            "wrong is": one.corrects,
            "source": one.source,
        }
    return [(label, text) for label, text in told.items() if text]


def _name(one: Finding) -> str:
    return one.key or one.rule


def _value(one: Finding) -> str:
    return f" = {json.dumps(one.value)}" if one.key else ""


def _origin(one: Finding) -> str:
    return one.place or (one.origin if one.origin else "not given")
