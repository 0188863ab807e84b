"""Series of values: what percentiles are worth, and what becomes of those of several processes."""

import json
import random

import pytest

from loadtests.report.series import Measures, Series


def series(values: list[float]) -> Series:
    made = Series()
    for value in values:
        made.add(value)
    return made


def test_percentiles_are_within_half_a_percent() -> None:
    draw = random.Random(0)
    values = sorted(draw.lognormvariate(-3, 1.5) for _ in range(10_000))
    told = series(values)
    for share in (0.01, 0.5, 0.9, 0.99):
        exact = values[int(share * len(values)) - 1]
        assert told.percentile(share) == pytest.approx(exact, rel=0.006)
    assert told.mean == pytest.approx(sum(values) / len(values))


def test_two_processes_measure_as_one() -> None:
    whole, first, second = Measures(), Measures(), Measures()
    for index in range(100):
        (first if index % 2 else second).record("ttft_s", index / 7, at=1000.0 + index)
        whole.record("ttft_s", index / 7, at=1000.0 + index)
    together = Measures()
    for measures in (first, second):
        together.add(json.loads(json.dumps(measures.take())))
    assert together.series == whole.series
    assert together.began == 1000.0
