"""Statistics of paired runs: ratios and their lower bounds."""

import random
import statistics
from collections.abc import Sequence

_RESAMPLES = 10_000


def pair_ratios(values: Sequence[float], references: Sequence[float]) -> list[float]:
    """Return each value divided by the reference of its pair, which cancels drift over a run."""
    return [value / reference for value, reference in zip(values, references, strict=True)]


def median_lower_bound(ratios: Sequence[float], confidence: float = 0.95) -> float:
    """Return the one-sided bootstrap bound of the median. For five pairs it is the smallest ratio.

    The resampling is seeded, so that equal runs give equal reports.
    """
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return medians[int((1 - confidence) * _RESAMPLES)]
