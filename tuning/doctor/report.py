"""Findings as plain lines, and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from tuning.doctor.finding import Finding, Severity

_STYLES = {Severity.HURTS: "bold red", Severity.CONSIDER: "yellow", Severity.FINE: "green"}


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"counts": counts(findings), "findings": [asdict(finding) for finding in findings]}


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    return {severity.value: sum(finding.severity is severity for finding in findings) for severity in Severity}


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    for finding in findings:
        text = Text(finding.severity.value, _STYLES[finding.severity]).append("\n".join(_lines(finding)), "default")
        console.print(text, end="\n\n", soft_wrap=True, highlight=False)
    found = counts(findings)
    console.print(f"{found['hurts']} that hurt, {found['consider']} to consider", highlight=False)


def _lines(finding: Finding) -> list[str]:
    value = f" = {json.dumps(finding.value)}" if finding.key else ""
    origin = finding.place or finding.origin or "not given"
    details = {"why": finding.why, "set": finding.suggestion, "effect": finding.effect, "wrong is": finding.corrects}
    details |= {"source": finding.source}
    if finding.severity is Severity.FINE:
        details |= {"why": ""}
    head = f": {finding.where}: {finding.key or finding.rule}{value} ({origin}): {finding.message}"
    return [head, *(f"  {label}: {text}" for label, text in details.items() if text)]
