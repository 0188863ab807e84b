"""Bounds of figures: what is read, and what is said of those that were missed."""

from pathlib import Path

import pytest

from loadtests.report.thresholds import Threshold, ThresholdError, load_thresholds

FIGURES = {"failures": 0.0, "ttft_s.p99": 3.0, "tokens_per_s": 150.0}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "bounds.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write figures with their bounds"),
        ("failures: 0", "failures: 0 is no bound"),
        ("failures: {most: 0}", "failures: .* is no bound"),
        ("failures: {max: none}", "failures: max = 'none' is no number"),
        ("failures: [", "bounds.yaml"),
    ],
)
def test_what_is_no_bound_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ThresholdError, match=says):
        load_thresholds(written(tmp_path, text))


def test_a_figure_that_the_run_has_not_is_not_passed_over() -> None:
    with pytest.raises(ThresholdError, match=r"ttft_s.p90: .* it has ttft_s.p99"):
        Threshold("ttft_s.p90", 1.0, True).judge(FIGURES)
