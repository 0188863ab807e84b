"""The fit of the speed model: what it was made of, and how it does on rows that it has not seen."""

import dataclasses
import json

import pytest

from scripts.fit_speeds import FITTED, PAGE, fit, page, predicted, rows
from tuning.plan.speed import Speeds, fitted


@pytest.fixture(scope="module")
def slow_factor() -> float:
    found: float = json.loads(FITTED.read_text(encoding="utf-8"))["slow_cores"]
    return found


def test_rows_that_were_held_out_are_predicted_within_15_percent(slow_factor: float) -> None:
    held_out = [row for row in rows() if not row.fits]
    assert len(held_out) > 20
    misses = {row.name: predicted(row, fitted(), slow_factor) / row.measured for row in held_out}
    assert {name: ratio for name, ratio in misses.items() if not 0.85 < ratio < 1.15} == {}


def test_the_constants_in_use_are_those_that_the_rows_give(slow_factor: float) -> None:
    speeds, slow = fit([row for row in rows() if row.fits])
    assert slow == pytest.approx(slow_factor, rel=0.01)
    for field in dataclasses.fields(Speeds):
        assert getattr(speeds, field.name) == pytest.approx(getattr(fitted(), field.name), rel=0.01), field.name


def test_the_file_names_the_rows_that_it_was_fitted_to() -> None:
    kept = json.loads(FITTED.read_text(encoding="utf-8"))["fitted_to"]
    assert kept == [f"{row.file} {row.name}" for row in rows() if row.fits]
    assert len(kept) < len(rows()) / 2


def test_the_page_shows_what_the_fit_gives() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m scripts.fit_speeds --write"
