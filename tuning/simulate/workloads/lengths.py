"""Lengths of prompts and completions: log-normal, and cut at the longest."""

import math
from functools import cached_property
from random import Random
from statistics import NormalDist

from tuning.plan.workload import Lengths

_ROUNDS = 60
_NORMAL = NormalDist()


class LogNormal:
    """`sigma` is the deviation of the logarithm; the mean is that of the lengths once cut."""

    def __init__(self, lengths: Lengths, sigma: float) -> None:
        self._mean, self._longest, self._sigma = lengths.mean, lengths.longest, sigma
        self._is_fixed = not sigma or lengths.mean >= 0.999 * lengths.longest

    @property
    def longest(self) -> int:
        return self._longest

    def drawn(self, draw: Random) -> int:
        return self.at(draw.gauss())

    def at(self, deviate: float) -> int:
        """Return the length of a standard normal deviate."""
        if self._is_fixed:
            return round(self._mean)
        return max(1, min(self._longest, round(math.exp(self._location + self._sigma * deviate))))

    @cached_property
    def _location(self) -> float:
        """The mean of the logarithm, found by halving."""
        low, high = math.log(self._mean) - 10 * self._sigma**2 - 10, math.log(self._longest) + 10 * self._sigma
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut_mean(middle) < self._mean else (low, middle)
        return low

    def _cut_mean(self, location: float) -> float:
        limit, sigma = math.log(self._longest), self._sigma
        below = math.exp(location + sigma**2 / 2) * _NORMAL.cdf((limit - location - sigma**2) / sigma)
        return below + self._longest * (1 - _NORMAL.cdf((limit - location) / sigma))
