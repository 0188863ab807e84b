"""Figures of a run: of its phases, their drift, and when a server is as fast as before a spike."""

import pytest

from loadtests.report.figures import figures
from loadtests.report.series import Measures, Phase


def measured(slow_from: float, slow_until: float) -> Measures:
    """Thirty seconds with first tokens after 0.1 s, but for a slow stretch."""
    measures = Measures()
    for second in range(30):
        slow = slow_from <= 1000 + second < slow_until
        measures.record("ttft_s", 0.4 if slow else 0.1, at=1000.0 + second)
        measures.record("tokens", 50.0, at=1000.0 + second)
    measures.ended = 1030.0
    return measures


def phases(*names: str) -> list[Phase]:
    return [Phase(name, 1000 + 10 * place, 1010 + 10 * place) for place, name in enumerate(names)]


def test_phases_have_figures_and_their_drift() -> None:
    told = figures(measured(1020, 1030), phases("first", "middle", "last"))
    assert told["tokens_per_s"] == 50
    assert (told["first.ttft_s.p50"], told["last.ttft_s.p50"]) == (0.1, 0.4)
    assert told["drift.ttft_s.p50"] == pytest.approx(4)
    assert told["drift.tokens_per_s"] == 1


@pytest.mark.parametrize(("slow_until", "recovery"), [(1024, 4), (1015, 0), (1030, None)])
def test_recovery_is_from_the_end_of_the_spike_to_the_first_second_as_fast_as_the_calm(
    slow_until: float, recovery: float | None
) -> None:
    found = figures(measured(1010, slow_until), phases("calm", "spike", "after"))
    assert found.get("recovery_s") == recovery
