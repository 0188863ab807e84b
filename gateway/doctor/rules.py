"""All rules, in the order in which findings and docs name them."""

from gateway.doctor.engine_rules import ENGINE_RULES
from gateway.doctor.finding import Finding, Severity
from gateway.doctor.length_rules import LENGTH_RULES
from gateway.doctor.live_rules import LIVE_RULES
from gateway.doctor.rule import Rule
from gateway.doctor.subject import Subject
from gateway.doctor.trl_rules import TRL_RULES
from gateway.doctor.verl_rules import VERL_RULES

RULES: tuple[Rule, ...] = (*LENGTH_RULES, *ENGINE_RULES, *VERL_RULES, *TRL_RULES, *LIVE_RULES)


def examine(subject: Subject) -> list[Finding]:
    """What all rules find, the worst first."""
    found = [finding for rule in RULES for finding in rule.findings(subject)]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))
