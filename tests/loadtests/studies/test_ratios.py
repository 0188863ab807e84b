"""The statistics of paired runs, on made-up numbers."""

import random

import pytest

from loadtests.studies.ratios import median_lower_bound, pair_ratios


def test_each_value_is_set_against_its_own_pair() -> None:
    assert pair_ratios([98.0, 49.0], [100.0, 50.0]) == [0.98, 0.98]


def test_more_pairs_tighten_the_bound() -> None:
    draw = random.Random(1)
    ratios = [draw.gauss(1.0, 0.02) for _ in range(50)]
    assert min(ratios) < median_lower_bound(ratios) < 1.0
    assert median_lower_bound(ratios) == pytest.approx(1.0, abs=0.02)
    assert median_lower_bound(ratios) == median_lower_bound(ratios)
