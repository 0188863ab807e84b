"""Time that outlives the process, whatever is done to the clock."""

import time

import pytest

from gateway.ledger.moment import Moment


@pytest.mark.parametrize("jump_s", [-1e6, 0.0, 1e6])
def test_a_clock_that_jumps_moves_nothing_within_a_boot(jump_s: float) -> None:
    before = Moment(wall=1e9, boot="a", uptime=100.0)
    assert before.seconds_until(Moment(wall=1e9 + jump_s, boot="a", uptime=103.0)) == 3.0


def test_between_two_boots_the_time_of_day_counts_and_never_runs_backwards() -> None:
    before = Moment(wall=1e9, boot="a", uptime=100.0)
    assert before.seconds_until(Moment(wall=1e9 + 60, boot="b", uptime=1.0)) == 60.0
    assert before.seconds_until(Moment(wall=1e9 - 60, boot="b", uptime=1.0)) == 0.0


def test_a_moment_is_now() -> None:
    first = Moment.now()
    assert abs(first.wall - time.time()) < 60
    assert 0 <= first.seconds_until(Moment.now()) < 60
