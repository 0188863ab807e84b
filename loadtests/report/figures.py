"""The figures of a run by the names used in thresholds: `tokens_per_s`, `ttft_s.p99`, `spike.ttft_s.p99`,
`recovery_s`."""

from collections.abc import Mapping, Sequence

from loadtests.report.recovery import recovery_s
from loadtests.report.series import Measures, Phase, Series

_COMPARED = ("p50", "p99", "mean")


def figures(measures: Measures, phases: Sequence[Phase] = ()) -> dict[str, float]:
    """Return all figures: of the run, of each phase under its name, and `drift` if there are phases."""
    found = _of_series(measures.total(), measures.seconds)
    for phase in phases:
        series = measures.between(phase.began, phase.ended)
        found |= {
            f"{phase.name}.{name}": value for name, value in _of_series(series, phase.ended - phase.began).items()
        }
    if (recovered := recovery_s(measures, phases)) is not None:
        found["recovery_s"] = recovered
    if phases and phases[0].name == "first":
        found |= _drift(found)
    return found


def _of_series(named: Mapping[str, Series], seconds: float) -> dict[str, float]:
    def count(name: str) -> int:
        return named[name].count if name in named else 0

    failures = count("failed_s") + count("failed_update_s")
    tokens = named["tokens"].sum if "tokens" in named else 0.0
    found = {
        "seconds": seconds,
        "completions": float(count("completion_s")),
        "failures": float(failures),
        "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
    }
    for name, series in named.items():
        found |= {f"{name}.{statistic}": value for statistic, value in series.summary().items()}
    return found


def _drift(found: Mapping[str, float]) -> dict[str, float]:
    """Return the last phase divided by the first."""
    names = [name.removeprefix("last.") for name in found if name.startswith("last.")]
    compared = [name for name in names if name == "tokens_per_s" or name.rpartition(".")[2] in _COMPARED]
    return {
        f"drift.{name}": found[f"last.{name}"] / found[f"first.{name}"]
        for name in compared
        if found.get(f"first.{name}")
    }
