"""The measures of a run: named series over time, small enough to keep for hours and to send to a master."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

# A percentile is exact to half of this share of its value, and fully exact in a series with one value.
_BUCKET = math.log(1.01)
_LEAST = 1e-9
_ZERO = round(math.log(_LEAST) / _BUCKET)
_MOST_WINDOWS = 240
_FIRST_WIDTH_S = 1


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
    """Series by name in windows of wall-clock time.

    Windows are a second wide at first; when there are too many, two become one: hours cost no more than minutes.
    """

    def __init__(self) -> None:
        self.width_s = _FIRST_WIDTH_S
        self.began, self.ended = math.inf, -math.inf
        self._windows: defaultdict[int, defaultdict[str, Series]] = defaultdict(lambda: defaultdict(Series))

    def record(self, name: str, value: float, at: float | None = None, *, is_beside: bool = False) -> None:
        """Record a value; `at` is its time since the epoch, by default now. What `is_beside` the run makes it no
        longer."""
        now = time.time()
        at = now if at is None else at
        if not is_beside:
            self.began, self.ended = min(self.began, at), max(self.ended, now)
        self._windows[int(at // self.width_s)][name].add(value)
        if len(self._windows) > _MOST_WINDOWS:
            self._widen(2 * self.width_s)

    def windows(self) -> list[tuple[float, Mapping[str, Series]]]:
        """Return the start and the series of each window with values, oldest first."""
        return [(index * self.width_s, self._windows[index]) for index in sorted(self._windows)]

    @property
    def seconds(self) -> float:
        """Return the time of the first value and of the last record."""
        return max(0.0, self.ended - self.began) if self._windows else 0.0

    def between(self, began: float, ended: float) -> dict[str, Series]:
        """Return the merged series of windows that start from `began` on and before `ended`."""
        return _merged(series for start, series in self.windows() if began <= start < ended)

    def total(self) -> dict[str, Series]:
        return self.between(-math.inf, math.inf)

    def take(self) -> Json:
        """Return and clear all values in JSON form, for a worker's report to its master."""
        windows = [
            [index, [[name, series.packed()] for name, series in named.items()]]
            for index, named in self._windows.items()
        ]
        self._windows.clear()
        return {"width_s": self.width_s, "began": self.began, "ended": self.ended, "windows": windows}

    def add(self, taken: Json) -> None:
        """Add the result of another process's `take`."""
        self.began, self.ended = min(self.began, taken["began"]), max(self.ended, taken["ended"])
        width_s = max(self.width_s, taken["width_s"])
        self._widen(width_s)
        for index, named in taken["windows"]:
            for name, packed in named:
                self._windows[index * taken["width_s"] // width_s][name].merge(Series.unpacked(packed))

    def _widen(self, width_s: int) -> None:
        narrow, factor = list(self._windows.items()), width_s // self.width_s
        if factor == 1:
            return
        self.width_s = width_s
        self._windows.clear()
        for index, named in narrow:
            for name, series in named.items():
                self._windows[index // factor][name].merge(series)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the run with its own figures, from `began` to `ended` since the epoch."""

    name: str
    began: float
    ended: float


def _merged(windows: Iterable[Mapping[str, Series]]) -> dict[str, Series]:
    merged: defaultdict[str, Series] = defaultdict(Series)
    for named in windows:
        for name, series in named.items():
            merged[name].merge(series)
    return dict(merged)
