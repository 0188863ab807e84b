"""docs/tuning.md: what the doctor's rules say, and nothing else."""

from scripts.docs.parts.tuning_guide import page
from tuning.doctor.rules.all import SECTIONS


def test_every_rule_is_on_it_once_and_says_why_and_from_where() -> None:
    told = page()
    all_rules = [rule for rules in SECTIONS.values() for rule in rules]
    ids = [rule.id for rule in all_rules]
    assert len(set(ids)) == len(ids)
    for rule in all_rules:
        assert told.count(f"### {rule.id}\n") == 1
        assert rule.why
        assert rule.source
