"""All rules, in the order in which findings and docs name them."""

from typing import Any

from tuning.doctor.finding import Finding, Severity
from tuning.doctor.rules import engine, lengths, live, trl, verl
from tuning.doctor.rules.rule import Rule, rules_of
from tuning.doctor.subject import Subject

SECTIONS: dict[str, tuple[Rule[Any], ...]] = {
    "Lengths": rules_of(lengths),
    "Engines": rules_of(engine),
    "verl": rules_of(verl),
    "TRL": rules_of(trl),
    "A running gateway": rules_of(live),
}
"""The rules by the section of docs/tuning.md that has them."""


def examine(subject: Subject) -> list[Finding]:
    """The findings of all rules: the worst first, and of these the ones with the most to gain."""
    found = [finding for rules in SECTIONS.values() for rule in rules for finding in rule.findings(subject)]
    order = list(Severity)
    return sorted(found, key=lambda finding: (order.index(finding.severity), -finding.gain))
