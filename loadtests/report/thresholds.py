"""Thresholds of a run in a YAML file.

failures: {max: 0}
tokens_per_s: {min: 200}
ttft_s.p99: {max: 2.5}
completion_s.p50: {max: 10}
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_SHOWN = 12


class ThresholdError(ValueError):
    """An invalid thresholds file, or a threshold without a figure."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A bound of one figure, such as `ttft_s.p99` or `tokens_per_s`."""

    figure: str
    bound: float
    is_most: bool

    def judge(self, figures: Mapping[str, float]) -> "Verdict":
        """Check the bound. Raise `ThresholdError` if the run lacks the figure: an unchecked bound is worthless."""
        if self.figure not in figures:
            near = difflib.get_close_matches(self.figure, figures, n=3) or sorted(figures)[:_SHOWN]
            raise ThresholdError(f"{self.figure}: this run has no such figure; it has {', '.join(near)}")
        return Verdict(self, figures[self.figure])


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure beside its bound."""

    threshold: Threshold
    value: float

    @property
    def is_met(self) -> bool:
        bound = self.threshold.bound
        return self.value <= bound if self.threshold.is_most else self.value >= bound

    def __str__(self) -> str:
        threshold, bound = self.threshold, self.threshold.bound
        least_or_most = "at most" if threshold.is_most else "at least"
        text = (
            f"{'met   ' if self.is_met else 'MISSED'}  {threshold.figure} = {self.value:.4g}, {least_or_most} {bound:g}"
        )
        if self.is_met:
            return text
        by = abs(self.value - bound)
        share = f", {by / abs(bound):.0%}" if bound else ""
        return f"{text}: {'over' if threshold.is_most else 'short'} by {by:.4g}{share}"


def load_thresholds(path: Path) -> list[Threshold]:
    """Read a thresholds file. Raise `ThresholdError` with file, figure and remedy."""
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ThresholdError(f"{path}: {error}") from error
    if not isinstance(tree, dict) or not tree:
        raise ThresholdError(f"{path}: write figures with their bounds, such as `failures: {{max: 0}}`")
    return [threshold for figure, bounds in tree.items() for threshold in _bounds(path, str(figure), bounds)]


def _bounds(path: Path, figure: str, bounds: Any) -> list[Threshold]:
    if not isinstance(bounds, dict) or not bounds or not set(bounds) <= {"min", "max"}:
        raise ThresholdError(
            f"{path}: {figure}: {bounds!r} is no bound; write {{max: NUMBER}}, {{min: NUMBER}} or both"
        )
    for name, bound in bounds.items():
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise ThresholdError(f"{path}: {figure}: {name} = {bound!r} is no number")
    return [Threshold(figure, float(bound), name == "max") for name, bound in bounds.items()]
