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


def test_replicas_are_looked_at_as_long_as_any_may_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "_last_end", 0.0)
    long, short = Backoff(), Backoff()
    assert not Backoff.is_any_on()
    long.busy(20.0)
    short.busy(0.1)
    assert Backoff.is_any_on()
    assert Backoff._last_end == long.until
