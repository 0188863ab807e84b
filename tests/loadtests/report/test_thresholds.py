"""Bounds of figures. `test_scenarios.py` has a run that misses one, and a file that is refused."""

import pytest

from loadtests.report.thresholds import Threshold, ThresholdError

FIGURES = {"failures": 0.0, "ttft_s.p99": 3.0, "tokens_per_s": 150.0}


def test_a_figure_that_the_run_has_not_is_not_passed_over() -> None:
    with pytest.raises(ThresholdError, match=r"ttft_s.p90: .* it has ttft_s.p99"):
        Threshold("ttft_s.p90", 1.0, True).judge(FIGURES)
