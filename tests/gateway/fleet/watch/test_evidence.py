"""The pause of a replica whose engine has no room."""

import pytest

from gateway.fleet.watch.evidence import Backoff


@pytest.mark.parametrize(("said", "least_s"), [(5.0, 4.0), (0.0, 0.1), (None, 0.1)])
def test_an_engine_without_room_rests_for_as_long_as_it_says_and_never_for_nothing(
    said: float | None, least_s: float
) -> None:
    backoff = Backoff()
    backoff.busy(said)
    assert backoff.left_s > least_s
