"""When a server is as fast as before a spike."""

from loadtests.report.figures import figures
from loadtests.report.recovery import recovery_s
from loadtests.report.series import Measures, Phase

PHASES = [Phase("calm", 1000, 1010), Phase("spike", 1010, 1020), Phase("after", 1020, 1030)]


def measured(slow_until: float) -> Measures:
    measures = Measures()
    for second in range(30):
        slow = 1010 <= 1000 + second < slow_until
        measures.record("ttft_s", 2.0 if slow else 0.1, at=1000.0 + second)
    return measures


def test_recovery_is_from_the_end_of_the_spike_to_the_first_second_as_fast_as_the_calm() -> None:
    assert recovery_s(measured(1024), PHASES) == 4
    assert recovery_s(measured(1015), PHASES) == 0
    assert figures(measured(1024), PHASES)["recovery_s"] == 4


def test_a_server_that_does_not_come_back_has_no_recovery() -> None:
    assert recovery_s(measured(1030), PHASES) is None
    assert "recovery_s" not in figures(measured(1030), PHASES)
    assert recovery_s(measured(1020), [Phase("first", 1000, 1010)]) is None
