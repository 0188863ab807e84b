"""Each test is in one suite of scripts/suites, whatever its marks, and engines of all tests have one environment."""

import itertools
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUITES = dict(re.findall(r'^  \[([\w-]+)\]="(.+)"$', (ROOT / "scripts" / "suites").read_text(encoding="utf-8"), re.M))
MARKS = sorted({word for chosen in SUITES.values() for word in re.findall(r"\w+", chosen)} - {"and", "or", "not"})
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def suites_of(marks: set[str]) -> list[str]:
    """The suites that choose a test with these marks. The grammar of pytest's -m is a part of Python's."""
    present = {mark: mark in marks for mark in MARKS}
    return [suite for suite, chosen in SUITES.items() if eval(chosen, {"__builtins__": {}}, present)]


def named_by(target: str) -> list[str]:
    """The suites that a target of the Makefile runs."""
    (suites,) = re.findall(rf"^{target}:.*\n\t@scripts/suites (.+)$", MAKEFILE, re.M)
    return [suite for suite in str(suites).split() if suite != "--"]


def test_every_set_of_marks_belongs_to_one_suite() -> None:
    sets = itertools.chain.from_iterable(itertools.combinations(MARKS, size) for size in range(len(MARKS) + 1))
    assert [marks for marks in sets if len(suites_of(set(marks))) != 1] == []


def test_the_parts_of_make_test_all_run_every_suite_once() -> None:
    (parts,) = re.findall(r"^test-all: (.+) ##", MAKEFILE, re.M)
    assert sorted(suite for part in str(parts).split() for suite in named_by(part)) == sorted(SUITES)


def test_pytest_alone_runs_the_units() -> None:
    assert PYPROJECT["tool"]["pytest"]["ini_options"]["addopts"][-1] == SUITES["unit"]


def test_every_mark_that_chooses_is_declared() -> None:
    declared = {line.partition(":")[0] for line in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    assert set(MARKS) <= declared


def test_stories_are_in_their_folder() -> None:
    """Alone it is looked through for them."""
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark." + "story" in path.read_text("utf-8")]
    assert marked
    assert {path.parent.name for path in marked} == {"stories"}


@pytest.fixture
def suites(tmp_path: Path) -> Path:
    """The script in a folder where Python says which marks it was given, and fails for verl's."""
    (tmp_path / "scripts").mkdir()
    for venv in (".venv", ".venv-verl"):
        python = tmp_path / venv / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\necho "ran $*"\ncase "$*" in *" verl and "*) exit 1;; esac\n')
        python.chmod(0o755)
    return Path(shutil.copy(ROOT / "scripts" / "suites", tmp_path / "scripts"))


@pytest.mark.parametrize("failing", [["verl", "--", "load", "ray"], ["load", "ray", "--", "verl"], ["ray", "verl"]])
def test_a_suite_that_fails_fails_the_run_on_either_side_and_all_run(suites: Path, failing: list[str]) -> None:
    found = subprocess.run([suites, *failing], capture_output=True, text=True, timeout=30)
    assert found.returncode == 1
    assert sorted(re.findall(r"== (\S+) tests", found.stdout)) == sorted(set(failing) - {"--"})
    assert "failed: verl" in found.stdout


def test_engines_of_all_tests_have_one_environment() -> None:
    assert "PYTEST_CURRENT_TEST" not in os.environ
