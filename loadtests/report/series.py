"""The measures of a run: named series, small enough to keep for hours and to send to a master."""

import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

# A percentile is exact to half of this share of its value, and fully exact in a series with one value.
_BUCKET = math.log(1.01)
_LEAST = 1e-9
_ZERO = round(math.log(_LEAST) / _BUCKET)


@dataclass(slots=True)
class Series:
    """Values of one measure. Count, sum and extremes are exact, percentiles within 0.5 %."""

    count: int = 0
    sum: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf
    _buckets: Counter[int] = field(default_factory=Counter)

    def add(self, value: float) -> None:
        self.count += 1
        self.sum += value
        self.least, self.greatest = min(self.least, value), max(self.greatest, value)
        self._buckets[round(math.log(max(value, _LEAST)) / _BUCKET)] += 1

    def merge(self, other: "Series") -> None:
        self.count += other.count
        self.sum += other.sum
        self.least, self.greatest = min(self.least, other.least), max(self.greatest, other.greatest)
        self._buckets.update(other._buckets)

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def percentile(self, share: float) -> float:
        """Return the least value that `share` of all values do not exceed; 0 for an empty series."""
        if not self.count:
            return 0.0
        wanted, seen = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                value = math.exp(bucket * _BUCKET) if bucket > _ZERO else 0.0
                return min(max(value, self.least), self.greatest)
        return self.greatest

    def summary(self) -> dict[str, float]:
        """Return the statistics for reports and thresholds."""
        if not self.count:
            return {"count": 0.0}
        percentiles = {f"p{round(100 * share)}": self.percentile(share) for share in (0.5, 0.9, 0.95, 0.99)}
        extremes = {"min": self.least, "max": self.greatest}
        return {"count": float(self.count), "sum": self.sum, "mean": self.mean, **percentiles, **extremes}

    def packed(self) -> list[Any]:
        return [self.count, self.sum, self.least, self.greatest, list(self._buckets.items())]

    @classmethod
    def unpacked(cls, packed: list[Any]) -> "Series":
        count, total, least, greatest, buckets = packed
        return cls(count, total, least, greatest, Counter(dict(buckets)))


class Measures:
    """Series by name."""

    def __init__(self) -> None:
        self.began, self.ended = math.inf, -math.inf
        self.series: defaultdict[str, Series] = defaultdict(Series)

    def record(self, name: str, value: float, at: float | None = None, *, is_beside: bool = False) -> None:
        """Record a value; `at` is its time since the epoch, by default now. What `is_beside` the run makes it no
        longer."""
        now = time.time()
        if not is_beside:
            self.began, self.ended = min(self.began, now if at is None else at), max(self.ended, now)
        self.series[name].add(value)

    @property
    def seconds(self) -> float:
        """Return the time between the first value and the last record."""
        return max(0.0, self.ended - self.began) if self.series else 0.0

    def take(self) -> Json:
        """Return and clear all values in JSON form, for a worker's report to its master."""
        packed = {name: series.packed() for name, series in self.series.items()}
        self.series.clear()
        return {"began": self.began, "ended": self.ended, "series": packed}

    def add(self, taken: Json) -> None:
        """Add the result of another process's `take`."""
        self.began, self.ended = min(self.began, taken["began"]), max(self.ended, taken["ended"])
        for name, packed in taken["series"].items():
            self.series[name].merge(Series.unpacked(packed))
