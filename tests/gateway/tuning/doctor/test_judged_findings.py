"""Precision of `hurts` on verl's own examples: `verl_trial/judged_hurts.json` judges each finding by hand.

The scripts are not kept here. With VERL_CHECKOUTS naming a folder that holds a checkout of each release, such as
FOLDER/v0.7.0, the findings are made again and have to be those of the table.
"""

import json
import os
from pathlib import Path

import pytest

from engines.errors import ConfigError
from gateway.tuning.doctor.finding import Severity
from gateway.tuning.doctor.rules.all import examine
from gateway.tuning.doctor.subject import subject_of

TABLE = json.loads((Path(__file__).parent / "verl_trial" / "judged_hurts.json").read_text(encoding="utf-8"))
CHECKOUTS = os.environ.get("VERL_CHECKOUTS", "")


def hurting(folder: Path, release: str) -> set[tuple[str, str, str, str]]:
    found = set()
    for path in sorted((folder / "examples").rglob("*.sh")):
        try:
            subject = subject_of(verl=path, verl_version=release)
        except ConfigError:
            continue  # a script that starts no trainer
        for one in examine(subject):
            if one.severity is Severity.HURTS:
                found.add((release, str(path.relative_to(folder)), one.rule, one.key))
    return found


def test_nineteen_of_twenty_findings_that_hurt_are_right() -> None:
    assert len(TABLE) >= 40
    assert sum(row["right"] for row in TABLE) / len(TABLE) >= 0.95


@pytest.mark.skipif(not CHECKOUTS, reason="VERL_CHECKOUTS names no folder with checkouts of verl")
@pytest.mark.parametrize("release", ["0.6.1", "0.7.0"])
def test_the_table_has_each_finding_that_hurts(release: str) -> None:
    rows = {(row["release"], row["script"], row["rule"], row["key"]) for row in TABLE if row["release"] == release}
    assert hurting(Path(CHECKOUTS) / f"v{release}", release) == rows
