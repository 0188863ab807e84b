"""Which test files a run imports: none whose marks keep all of their tests out of it, and with them no engine."""

import itertools
import re
from pathlib import Path

import pytest

_MARKS_OF_A_FILE = re.compile(r"^pytestmark = .+$", re.MULTILINE)
_MARK = re.compile(r"pytest\.mark\.(\w+)")
_NAME = re.compile(r"\w+")
_WORDS = {"and", "or", "not"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not (chosen := config.option.markexpr) or not collection_path.match("test_*.py"):
        return None
    names = set(_NAME.findall(chosen)) - _WORDS
    told = _MARKS_OF_A_FILE.search(collection_path.read_text(encoding="utf-8"))
    marks = names & set(_MARK.findall(told[0]) if told else ())
    return None if may_choose(chosen, marks, names) else True


def may_choose(expression: str, marks: set[str], names: set[str]) -> bool:
    """Return True if `expression` (of -m) chooses some test that has `marks`, and perhaps others of `names`."""
    others = sorted(names - marks)
    for present in itertools.product((False, True), repeat=len(others)):
        known = dict(zip(others, present, strict=True)) | dict.fromkeys(marks, True)
        if eval(expression, {"__builtins__": {}}, known):  # pytest's grammar of marks is a part of Python's
            return True
    return False
