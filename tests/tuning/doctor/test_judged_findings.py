"""Precision on TRL's own examples: a table that judges each finding, and says why.

`judged_trl.json` has all findings in four releases of TRL (0.24.0, 1.0.0, 1.9.0, July 2026), in the programs that call
GRPOConfig, the commands of docstrings and the YAML; `trl_facts.json` has what they are made from again. A finding is
wrong where its advice would change nothing in that program, or do harm, and where it could not be shown to help. With
TRL_CHECKOUTS naming a folder that holds a checkout of each release, such as FOLDER/v1.9.0, the facts are made again and
have to be the same.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ConfigError
from tests.tuning.doctor.trl_trial import trl_facts
from tuning.doctor.finding import Severity
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of

TRIAL = Path(__file__).parent / "trl_trial"
TRL = json.loads((TRIAL / "judged_trl.json").read_text(encoding="utf-8"))
TRL_CHECKOUTS = os.environ.get("TRL_CHECKOUTS", "")
_PLACES = re.compile(r"\S+\.(sh|py)(:\d+)?: ")


def share_right(groups: list[dict[str, Any]]) -> float:
    right = sum(len(group["findings"]) for group in groups if group["right"])
    return right / sum(len(group["findings"]) for group in groups)


@pytest.mark.parametrize(("severity", "least"), [("hurts", 0.95), ("consider", 0.9)])
def test_findings_in_trls_examples_are_right(severity: str, least: float) -> None:
    groups = [group for group in TRL if group["severity"] == severity]
    assert share_right(groups) >= least
    # A list of values that only a run has is always right.
    assert share_right([group for group in groups if group["rule"] != "trl-unread"]) >= least


@pytest.mark.parametrize("release", trl_facts.RELEASES)
def test_the_table_has_each_finding_in_trls_examples_with_what_it_says(tmp_path: Path, release: str) -> None:
    found, others = [], 0
    for name, path in trl_facts.written(tmp_path, release):
        try:
            subject = subject_of(trl=path)
        except ConfigError:
            others += 1  # another trainer's
            continue
        found += [(name, one) for one in examine(subject) if one.severity is not Severity.FINE]
    assert others >= 20
    assert {(group, script, key) for group, script, key in _judged(release)} == {
        ((one.rule, one.severity, _PLACES.sub("", one.message), one.suggestion), name, one.key) for name, one in found
    }


def _judged(release: str) -> list[tuple[tuple[str, ...], str, str]]:
    return [
        (tuple(group[part] for part in ("rule", "severity", "says", "suggestion")), script, key)
        for group in TRL
        for its_release, script, key in group["findings"]
        if its_release == release
    ]


@pytest.mark.skipif(not TRL_CHECKOUTS, reason="TRL_CHECKOUTS names no folder with checkouts of TRL")
def test_the_facts_of_trls_examples_are_those_of_trl() -> None:
    assert trl_facts.dumped(trl_facts.facts(Path(TRL_CHECKOUTS))) == trl_facts.FILE.read_text(encoding="utf-8")
