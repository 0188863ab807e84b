"""Events of the fleet: kept in order, and bounded."""

from gateway.fleet.history import KEPT_EVENTS, Events


def test_the_last_hundred_are_kept_in_their_order() -> None:
    found = Events()
    for number in range(3 * KEPT_EVENTS):
        found.add("engine-0", str(number))
    assert [event["text"] for event in found.last] == [
        str(number) for number in range(2 * KEPT_EVENTS, 3 * KEPT_EVENTS)
    ]
    assert found.last[0]["subject"] == "engine-0"
