"""A run beside an earlier one, figure by figure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_WHOLE = ("tokens_per_s", "completions", "failures")
_STATISTICS = ("p50", "p99", "mean")


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both runs."""

    figure: str
    earlier: float
    now: float

    @property
    def ratio(self) -> float | None:
        return self.now / self.earlier if self.earlier else None

    def __str__(self) -> str:
        times = "" if self.ratio is None else f", {self.ratio:.2f} times"
        return f"{self.figure:<24} {self.earlier:.4g} -> {self.now:.4g}{times}"


def read_figures(path: Path) -> dict[str, float]:
    """Read what `--figures` wrote. Raise `ValueError` with file and reason."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: no JSON that --figures wrote: {error}") from error
    if not isinstance(found, dict) or "tokens_per_s" not in found:
        raise ValueError(f"{path}: no figures of a run in it; give a file that --figures wrote")
    return {str(name): float(value) for name, value in found.items() if isinstance(value, int | float)}


def compared(earlier: Mapping[str, float], now: Mapping[str, float], names: Mapping[str, str]) -> list[Compared]:
    """Return the figures that both runs have: those of the whole run, and of each measure in `names`."""
    wanted = [*_WHOLE, *(f"{name}.{statistic}" for name in names for statistic in _STATISTICS)]
    return [Compared(name, earlier[name], now[name]) for name in wanted if name in earlier and name in now]
