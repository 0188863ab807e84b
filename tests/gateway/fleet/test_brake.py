"""The brake of an engine: its holders, and its end."""

import asyncio

from engines.types import PauseMode
from gateway.fleet.brake import Holder
from tests.rigs.rig import Rig


async def test_an_engine_that_is_lost_while_it_is_held_is_not_called_again(rig: Rig) -> None:
    replica = rig.fleet.replicas[0]
    await replica.brake.stop(Holder.UPDATE, PauseMode.KEEP, clear_cache=False, timeout_s=5.0)
    await rig.replicas[0].kill()
    await rig.until({"engine-1": "SERVING"})
    replica.brake.let_go(Holder.UPDATE)
    await asyncio.sleep(0)
    assert "brake of engine-0" not in {task.get_name() for task in asyncio.all_tasks()}
