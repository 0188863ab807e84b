"""The time that a server needs after a spike."""

from collections.abc import Sequence

from loadtests.report.series import Measures, Phase

# First tokens are as soon as in the calm: by median, within so much of it.
_TIMES, _MORE_S = 1.5, 0.02
_IN_A_ROW = 3


def recovery_s(measures: Measures, phases: Sequence[Phase]) -> float | None:
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
