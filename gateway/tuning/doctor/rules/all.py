"""All rules, in the order in which findings and docs name them."""

from gateway.tuning.doctor.finding import Finding, Severity
from gateway.tuning.doctor.rules.engine import ENGINE_RULES
from gateway.tuning.doctor.rules.lengths import LENGTH_RULES
from gateway.tuning.doctor.rules.live import LIVE_RULES
from gateway.tuning.doctor.rules.rule import Rule
from gateway.tuning.doctor.rules.trl import TRL_RULES
from gateway.tuning.doctor.rules.verl import VERL_RULES
from gateway.tuning.doctor.rules.verl_values import VERL_VALUE_RULES
from gateway.tuning.doctor.subject import Subject

RULES: tuple[Rule, ...] = (*LENGTH_RULES, *ENGINE_RULES, *VERL_RULES, *VERL_VALUE_RULES, *TRL_RULES, *LIVE_RULES)


def examine(subject: Subject) -> list[Finding]:
    """The findings of all rules: the worst first, and of these the ones with the most to gain."""
    found = [finding for rule in RULES for finding in rule.findings(subject)]
    order = list(Severity)
    return sorted(found, key=lambda finding: (order.index(finding.severity), -finding.gain))
