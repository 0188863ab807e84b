"""The steps of a replica's recovery, as the status shows them."""

from typing import Any

from loadtests.studies.weights.recovery import Watch


def replica(pid: int, state: str = "SERVING", placed: int = 0, group: str = "engine") -> dict[str, Any]:
    return {"pid": pid, "state": state, "samples_placed": placed, "group": group}


def test_each_part_ends_when_the_status_first_shows_it() -> None:
    watch = Watch(replica(1), [replica(1), replica(2)])
    other = replica(2, placed=9)
    watch.see([replica(1), other], 0.1)
    watch.see([replica(1, "SUSPECT"), other], 0.2)
    watch.see([other], 3.0)
    watch.see([other, replica(3, "SYNCING")], 40.0)
    watch.see([other, replica(3)], 44.0)
    watch.see([other, replica(3, placed=1)], 44.5)
    watch.see([other, replica(3, placed=2)], 45.0)
    assert (watch.noticed, watch.restarted, watch.serving, watch.placed) == (0.2, 40.0, 44.0, 44.5)


def test_a_replica_of_another_group_or_that_was_there_before_is_not_in_its_place() -> None:
    watch = Watch(replica(1), [replica(1), replica(2)])
    watch.see([replica(2, placed=1), replica(4, group="judge", placed=1)], 1.0)
    assert (watch.noticed, watch.restarted, watch.placed) == (1.0, None, None)
