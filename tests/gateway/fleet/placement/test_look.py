"""The replicas with room in a look are those that a count from the start finds, after each step of it."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from engines.engine import Engine
from gateway.fleet.placement.look import Look
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.waiting import Demand, Queue
from tests.rigs.stories.played_fleet import PlayedFleet

PLACES = 4
QUEUES = [Queue(Demand(None, version, None, needs_ids=False, needs_route="")) for version in range(2)]


@given(st.lists(st.tuples(st.sampled_from(["place", "reserve", "need"]), st.integers(0, 3), st.integers(1, 4))))
def test_room_is_counted_once_and_stays_right(steps: list[tuple[str, int, int]]) -> None:
    replicas = PlayedFleet([cast(Engine, None)] * 4, PLACES).replicas
    look, least = Look(), 1
    look.able = {QUEUES[0]: replicas, QUEUES[1]: replicas[1:]}
    for step, index, samples in steps:
        replica = replicas[index]
        if step == "place":
            replica.reserve(Rollout(request_id="r", model="m", n=samples, tokens=1))
            look.took(replica)
        elif step == "reserve":
            look.reserve(replica)
        else:
            least = max(least, samples)
            look.need(least)
        for queue, able in look.able.items():
            assert look.open_for(queue) == [
                one
                for one in able
                if (not one.load_samples or one.load_samples + least <= PLACES) and one not in look.reserved
            ]
