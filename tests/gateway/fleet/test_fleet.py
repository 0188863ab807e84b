"""Who may serve: replicas that join, fall silent, die and come back."""

import asyncio

import aiohttp
import pytest

from engines.types import EngineStart, ReplicaInfo, ReplicaState
from gateway.config.schema import Config
from gateway.fleet.fleet import Fleet
from tests.rigs.calls import until
from tests.rigs.rig import FAST_WATCH, SimReplica, StartRig


async def test_after_the_configured_wait_those_present_are_the_fleet(start_rig: StartRig) -> None:
    fleet = {"discover_interval_s": 0.05, "probe_interval_s": 0.05, "lost_after_s": 0.2, "complete_within_s": 0.3}
    rig = await start_rig(fleet=fleet)
    await rig.replicas.pop().kill()
    await until(lambda: rig.get("/health"), lambda got: got[0] == 503)
    await until(lambda: rig.get("/health"), lambda got: got[0] == 200)


async def test_a_rollout_that_no_replica_takes_in_time_is_told_why(start_rig: StartRig) -> None:
    rig = await start_rig(num_replicas=1, gateway={"queue_timeout_s": 0.3})
    await rig.replicas.pop().kill()
    await rig.until({})
    status, reply = await rig.post("/v1/completions", {"model": "sim", "prompt": [5]})
    assert status == 504
    assert "gateway.queue_timeout_s" in reply["error"]["message"]


async def test_a_replica_that_refuses_connections_has_ended_and_is_lost_at_once(start_rig: StartRig) -> None:
    rig = await start_rig(num_replicas=2, fleet=FAST_WATCH | {"lost_after_s": 60.0})
    victim = rig.fleet.replicas[0]
    await rig.replicas[0].kill()
    await until(lambda: victim.state is ReplicaState.LOST)
    assert "Cannot connect" in victim.reason


async def test_an_engine_that_a_gateway_before_this_one_froze_goes_on(start_rig: StartRig) -> None:
    rig = await start_rig(num_replicas=1)
    engine = rig.fleet.replicas[0].engine
    await rig.replicas[0].kill()
    await rig.until({})
    successor = await SimReplica("engine-0", seed=0, sim=rig.sim).start()
    async with aiohttp.ClientSession() as client:
        await client.post(f"{successor.info.url}/pause?mode=keep")
    rig.replicas = [successor]
    await rig.until({"engine-0": "SERVING"})
    await asyncio.wait_for(rig.complete([[5]]), 30)
    assert rig.fleet.replicas[0].engine is not engine


async def test_an_engine_that_tells_its_start_is_discovered_at_once(start_rig: StartRig) -> None:
    rig = await start_rig(num_replicas=1, fleet=FAST_WATCH | {"discover_interval_s": 60.0})
    await rig.replicas[0].kill()
    await rig.until({})
    rig.replicas = [await SimReplica("engine-0", seed=0, sim=rig.sim).start()]
    rig.fleet.told(EngineStart(replica_id="engine-0", group="engine", phases=()))
    await rig.until({"engine-0": "SERVING"})


def test_the_policy_may_grow_to_the_most_replicas_of_its_groups() -> None:
    engines = {
        "a": {"kind": "sim", "served_model_name": "m", "num_replicas": 1, "max_replicas": 4},
        "b": {"kind": "sim", "served_model_name": "m", "num_replicas": 2},
        "judge": {"kind": "sim", "served_model_name": "j", "frozen": True, "max_replicas": 9},
    }

    async def nobody() -> list[ReplicaInfo]:
        return []

    fleet = Fleet(
        Config.model_validate({"engines": engines}), discover=nobody, connect=lambda _: pytest.fail("no engine")
    )
    assert (fleet.expected, fleet.most_of_policy) == (4, 6)
