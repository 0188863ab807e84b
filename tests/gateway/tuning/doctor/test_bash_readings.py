"""Scripts are read as bash itself runs them, by its own account (`verl_trial/bash_account.py`).

`verl_trial/bash_readings.jsonl` has the facts of each script of seven releases of verl. The scripts are not kept here.
With VERL_CHECKOUTS naming a folder that holds a checkout of each release, such as FOLDER/v0.7.0, they are read again.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.tuning.doctor.verl_trial.bash_account import commands_of, facts, overrides_by_bash, reading
from tests.gateway.tuning.doctor.verl_trial.random_scripts import drawn

FACTS = Path(__file__).parent / "verl_trial" / "bash_readings.jsonl"
CHECKOUTS = os.environ.get("VERL_CHECKOUTS", "")


def share_read_right(rows: list[dict[str, Any]]) -> float:
    """Values that only a run has count as read where the doctor lists them."""
    return sum(row["reading"] in ("right", "listed") for row in rows) / len(rows)


def test_nineteen_of_twenty_scripts_of_verl_are_read_right() -> None:
    rows = [json.loads(line) for line in FACTS.read_text(encoding="utf-8").splitlines()]
    trainers = [row for row in rows if row["overrides"] is not None]
    assert len(rows) >= 1000
    assert len(trainers) >= 500
    assert share_read_right(trainers) >= 0.95
    for release in {row["release"] for row in rows}:
        assert share_read_right([row for row in trainers if row["release"] == release]) >= 0.95, release


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUTS, reason="VERL_CHECKOUTS names no folder with checkouts of verl")
def test_scripts_of_verl_are_read_as_the_facts_have_it() -> None:
    kept = {(row["release"], row["script"]): row for row in map(json.loads, FACTS.read_text().splitlines())}
    for row in facts(Path(CHECKOUTS)):
        assert kept.get((row["release"], row["script"]), row) == row


def wrong(folder: Path, seeds: range) -> list[int]:
    path = folder / "train.sh"
    found = []
    for seed in seeds:
        path.write_text(drawn(seed), encoding="utf-8")
        if reading(path, overrides_by_bash(path), "") not in ("right", "listed"):
            found.append(seed)
    return found


def test_a_drawn_script_is_read_as_bash_runs_it(tmp_path: Path) -> None:
    assert wrong(tmp_path, range(12)) == []


@pytest.mark.slow
def test_every_drawn_script_is_read_as_bash_runs_it(tmp_path: Path) -> None:
    assert wrong(tmp_path, range(12, 400)) == []


def test_the_account_has_the_words_of_each_program_and_ends_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("set -eu\ncd /nowhere\nsource /nowhere\nserve 'a b' &\nB=$(count x)\ntrain n=$NODES b=$B\n")
    found = commands_of(path)
    assert ["serve", "a b"] in found
    assert ["train", "n=", "b=$(count)"] in found
