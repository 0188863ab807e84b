"""In which order rollouts are placed."""

import asyncio

from gateway.fleet.metrics import Metrics
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.replica import Replica
from tests.rigs.rig import StartRig


async def test_the_rest_of_what_has_begun_is_placed_before_what_has_not(start_rig: StartRig) -> None:
    rig = await start_rig(1)
    scheduler = Scheduler(rig.config.gateway, rig.fleet, Metrics())
    placed: list[str] = []

    async def place(request_id: str, *, goes_on: bool = False) -> None:
        async def call(_: Replica) -> None:
            placed.append(request_id)

        rollout = Rollout(request_id=request_id, model="sim", n=1, tokens=1, goes_on=goes_on)
        await scheduler.run(rollout, call)

    scheduler.close_gate("test")
    tasks = [asyncio.create_task(place(one)) for one in ("first", "second")]
    tasks.append(asyncio.create_task(place("rest", goes_on=True)))
    await asyncio.sleep(0.05)
    assert placed == []
    scheduler.open_gate("test")
    await asyncio.gather(*tasks)
    assert placed == ["rest", "first", "second"]
