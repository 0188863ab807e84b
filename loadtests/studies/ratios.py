"""The statistics of paired runs: how the gateway compares, and how sure that is."""

import random
import statistics
from collections.abc import Sequence

_RESAMPLES = 10_000


def pair_ratios(values: Sequence[float], references: Sequence[float]) -> list[float]:
    """Each value by the reference measured beside it, so that what drifts over a run touches both alike."""
    return [value / reference for value, reference in zip(values, references, strict=True)]


def median_lower_bound(ratios: Sequence[float], confidence: float = 0.95) -> float:
    """One-sided bootstrap bound of the median. Of five pairs it is the smallest ratio: it claims no more than was seen.

    The resampling is seeded, so a report made twice from the same runs says the same.
    """
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return medians[int((1 - confidence) * _RESAMPLES)]
