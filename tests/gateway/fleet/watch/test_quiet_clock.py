"""A replica's silence is counted under load alone."""

import pytest

from gateway.fleet.watch import quiet_clock
from gateway.fleet.watch.quiet_clock import QuietClock


class PlayedTime:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedTime:
    time = PlayedTime()
    monkeypatch.setattr(quiet_clock, "time", time)
    return time


def test_it_counts_while_it_runs(played: PlayedTime) -> None:
    clock = QuietClock()
    played.now += 5.0
    assert clock.seconds == 0.0
    for _ in range(2):
        clock.run()
        played.now += 3.0
        clock.stop()
        played.now += 100.0
    assert clock.seconds == 6.0
    clock.run()
    played.now += 1.0
    clock.run()
    assert clock.seconds == 7.0


def test_a_restart_does_not_stop_it(played: PlayedTime) -> None:
    clock = QuietClock()
    clock.run()
    played.now += 3.0
    clock.restart()
    played.now += 2.0
    assert clock.seconds == 2.0
    clock.stop()
    clock.restart()
    played.now += 2.0
    assert clock.seconds == 0.0
