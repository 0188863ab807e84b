"""Precision on verl's and TRL's own examples: tables that judge each finding, and say why.

`verl_trial/judged_hurts.json` has the findings that hurt in two releases of verl, judged by themselves.
`judged_consider.json` has those to consider in verl 0.7.0, and `judged_trl.json` all in four releases of TRL (0.24.0,
1.0.0, 1.9.0, July 2026; the commands of docstrings too): each is in the group of the criterion that judged it. Criteria
were read in the trainers' code and guides. The scripts are not kept here. With VERL_CHECKOUTS naming a folder that
holds a checkout of each release, such as FOLDER/v0.7.0, the findings are made again and have to be those of the tables.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ConfigError
from gateway.tuning.doctor.finding import Severity
from gateway.tuning.doctor.rules.all import examine
from gateway.tuning.doctor.subject import subject_of

TRIAL = Path(__file__).parent / "verl_trial"
TABLE = json.loads((TRIAL / "judged_hurts.json").read_text(encoding="utf-8"))
CONSIDER = json.loads((TRIAL / "judged_consider.json").read_text(encoding="utf-8"))
TRL = json.loads((TRIAL / "judged_trl.json").read_text(encoding="utf-8"))
CHECKOUTS = os.environ.get("VERL_CHECKOUTS", "")
needs_checkouts = pytest.mark.skipif(not CHECKOUTS, reason="VERL_CHECKOUTS names no folder with checkouts of verl")


def found_in(folder: Path, release: str, severity: Severity) -> set[tuple[str, str, str, str]]:
    found = set()
    for path in sorted((folder / "examples").rglob("*.sh")):
        try:
            subject = subject_of(verl=path, verl_version=release)
        except ConfigError:
            continue  # a script that starts no trainer
        for one in examine(subject):
            if one.severity is severity:
                found.add((release, str(path.relative_to(folder)), one.rule, one.key))
    return found


def share_right(groups: list[dict[str, Any]]) -> float:
    right = sum(len(group["findings"]) for group in groups if group["right"])
    return right / sum(len(group["findings"]) for group in groups)


def test_nineteen_of_twenty_findings_that_hurt_are_right() -> None:
    assert len(TABLE) >= 40
    assert sum(row["right"] for row in TABLE) / len(TABLE) >= 0.95


def test_nine_of_ten_findings_to_consider_are_right() -> None:
    assert sum(len(group["findings"]) for group in CONSIDER) >= 1000
    assert share_right(CONSIDER) >= 0.9
    # Advice that holds for nearly every file could hide wrong advice by its number.
    often = {
        "verl-fsdp2",
        "verl-liger",
        "verl-forward-prefetch",
        "verl-forward-only",
        "verl-entropy-memory",
        "log-stats",
    }
    assert share_right([group for group in CONSIDER if group["rule"] not in often]) >= 0.9


@pytest.mark.parametrize(("severity", "least"), [("hurts", 0.95), ("consider", 0.9)])
def test_findings_in_trls_examples_are_right(severity: str, least: float) -> None:
    assert share_right([group for group in TRL if group["severity"] == severity]) >= least


@needs_checkouts
@pytest.mark.parametrize("release", ["0.6.1", "0.7.0"])
def test_the_table_has_each_finding_that_hurts(release: str) -> None:
    rows = {(row["release"], row["script"], row["rule"], row["key"]) for row in TABLE if row["release"] == release}
    assert found_in(Path(CHECKOUTS) / f"v{release}", release, Severity.HURTS) == rows


@needs_checkouts
def test_the_table_has_each_finding_to_consider() -> None:
    """What could not be read has no key, and stands in the table by the key that the text names."""
    rows = {
        ("0.7.0", f"examples/{script}", group["rule"], key if group["rule"] != "verl-unread" else "")
        for group in CONSIDER
        for script, key in group["findings"]
    }
    assert found_in(Path(CHECKOUTS) / "v0.7.0", "0.7.0", Severity.CONSIDER) == rows
