"""The figures of a run by the names used in thresholds: `tokens_per_s`, `ttft_s.p99`, `spike.ttft_s.p99`,
`recovery_s`."""

from collections.abc import Mapping, Sequence

from loadtests.report.series import Measures, Phase, Series

_COMPARED = ("p50", "p99", "mean")
# First tokens are as soon as in the calm: by median, within so much of it, in so many windows in a row.
_TIMES, _MORE_S, _IN_A_ROW = 1.5, 0.02, 3


def figures(measures: Measures, phases: Sequence[Phase] = ()) -> dict[str, float]:
    """Return all figures: of the run, of each phase under its name, and `drift` if there are phases."""
    found = _of_series(measures.total(), measures.seconds)
    for phase in phases:
        series = measures.between(phase.began, phase.ended)
        found |= {
            f"{phase.name}.{name}": value for name, value in _of_series(series, phase.ended - phase.began).items()
        }
    if (recovered := _recovery_s(measures, phases)) is not None:
        found["recovery_s"] = recovered
    if phases and phases[0].name == "first":
        found |= _drift(found)
    return found


def totals(found: Mapping[str, float]) -> str:
    """Return the run in a line."""
    counts = f"{found['completions']:.0f} completions, {found['failures']:.0f} failures"
    return f"{counts}, {found['tokens_per_s']:.0f} tokens/s over {found['seconds']:.1f} s"


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


def _recovery_s(measures: Measures, phases: Sequence[Phase]) -> float | None:
    """Return the seconds from the end of the phase `spike` until requests that arrive have first tokens as soon as in
    `calm`, three windows in a row or up to the end; None where that does not come, or without these phases."""
    named = {phase.name: phase for phase in phases}
    if not {"calm", "spike"} <= set(named):
        return None
    calm = measures.between(named["calm"].began, named["calm"].ended).get("ttft_s")
    if calm is None:
        return None
    limit, end = calm.percentile(0.5) * _TIMES + _MORE_S, named["spike"].ended
    later = [(start, found["ttft_s"].percentile(0.5)) for start, found in measures.windows() if "ttft_s" in found]
    later = [(start, median) for start, median in later if start >= end]
    for index, (start, _) in enumerate(later):
        if all(median <= limit for _, median in later[index : index + _IN_A_ROW]):
            return start - end
    return None
