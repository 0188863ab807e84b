"""Precision on verl's and TRL's own examples: tables that judge each finding, and say why.

`verl_trial/judged_hurts.json` has the findings that hurt in two releases of verl. `judged_consider.json` has those to
consider in verl 0.7.0, each with what it says and suggests: cases that are alike in that and in what decides them are
judged once. A finding is wrong where its advice would change nothing in that script, or do harm, and where it could not
be shown to help. `example_facts.json` has the words of the scripts' commands, from which the findings are made again.
`judged_trl.json` has all findings in four releases of TRL (0.24.0, 1.0.0, 1.9.0, July 2026), in the programs that call
GRPOConfig, the commands of docstrings and the YAML; `trl_facts.json` has what they are made from again. The scripts are
not kept here. With VERL_CHECKOUTS or TRL_CHECKOUTS naming a folder that holds a checkout of each release, such as
FOLDER/v0.7.0, the facts are made again and have to be the same.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ConfigError
from gateway.tuning.doctor.finding import Finding, Severity
from gateway.tuning.doctor.rules.all import examine
from gateway.tuning.doctor.subject import subject_of
from tests.gateway.tuning.doctor.verl_trial import example_facts, trl_facts

TRIAL = Path(__file__).parent / "verl_trial"
TABLE = json.loads((TRIAL / "judged_hurts.json").read_text(encoding="utf-8"))
CONSIDER = json.loads((TRIAL / "judged_consider.json").read_text(encoding="utf-8"))
TRL = json.loads((TRIAL / "judged_trl.json").read_text(encoding="utf-8"))
CHECKOUTS = os.environ.get("VERL_CHECKOUTS", "")
TRL_CHECKOUTS = os.environ.get("TRL_CHECKOUTS", "")
_PLACE = re.compile(r"^\S+\.sh(:\d+)?: ")
_PLACES = re.compile(r"\S+\.(sh|py)(:\d+)?: ")
Found = tuple[str, Finding]


@pytest.fixture(scope="module", params=example_facts.RELEASES)
def examples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Found]]:
    return request.param, found_in(tmp_path_factory.mktemp("examples"), request.param)


def found_in(folder: Path, release: str) -> list[Found]:
    """Return the findings in the examples of a release, each with its script."""
    found: list[Found] = []
    for path in example_facts.written(folder, release):
        try:
            subject = subject_of(verl=path, verl_version=release)
        except ConfigError:
            continue  # a script that starts no trainer
        name = str(path.relative_to(folder / release))
        found += [(name, finding) for finding in examine(subject) if finding.severity is not Severity.FINE]
    return found


def share_right(groups: list[dict[str, Any]]) -> float:
    right = sum(len(group["findings"]) for group in groups if group["right"])
    return right / sum(len(group["findings"]) for group in groups)


def test_nineteen_of_twenty_findings_that_hurt_are_right() -> None:
    assert len(TABLE) >= 40
    assert sum(row["right"] for row in TABLE) / len(TABLE) >= 0.95


def test_nine_of_ten_findings_to_consider_are_right() -> None:
    assert sum(len(group["findings"]) for group in CONSIDER) >= 600
    assert share_right(CONSIDER) >= 0.9
    # Advice that holds for many files could hide wrong advice by its number.
    often = {"verl-fsdp2", "verl-liger", "verl-entropy-memory", "verl-dynamic-batches", "log-stats"}
    assert share_right([group for group in CONSIDER if group["rule"] not in often]) >= 0.9


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


def test_the_table_has_each_finding_that_hurts(examples: tuple[str, list[Found]]) -> None:
    release, found = examples
    rows = {(row["script"], row["rule"], row["key"]) for row in TABLE if row["release"] == release}
    hurting = {(script, one.rule, one.key) for script, one in found if one.severity is Severity.HURTS}
    assert hurting == rows


@pytest.mark.parametrize("examples", ["0.7.0"], indirect=True)
def test_the_table_has_each_finding_to_consider_with_what_it_says(examples: tuple[str, list[Found]]) -> None:
    _, found = examples
    rows = {
        (f"examples/{script}", group["rule"], key, group["says"], group["suggestion"])
        for group in CONSIDER
        for script, key in group["findings"]
    }
    assert rows == {
        (script, one.rule, one.key, _PLACE.sub("", one.message), one.suggestion)
        for script, one in found
        if one.severity is Severity.CONSIDER
    }


@pytest.mark.skipif(not CHECKOUTS, reason="VERL_CHECKOUTS names no folder with checkouts of verl")
def test_the_facts_of_the_examples_are_those_of_verl() -> None:
    assert example_facts.dumped(example_facts.facts(Path(CHECKOUTS))) == example_facts.FILE.read_text(encoding="utf-8")


@pytest.mark.skipif(not TRL_CHECKOUTS, reason="TRL_CHECKOUTS names no folder with checkouts of TRL")
def test_the_facts_of_trls_examples_are_those_of_trl() -> None:
    assert trl_facts.dumped(trl_facts.facts(Path(TRL_CHECKOUTS))) == trl_facts.FILE.read_text(encoding="utf-8")
