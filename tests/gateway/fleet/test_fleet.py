"""Who may serve: replicas that join, fall silent, die and come back."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from engines.types import EngineStart, ReplicaInfo, ReplicaState
from gateway.config.schema import Config
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.routing import Rollout
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


@pytest.mark.parametrize("standby", [0, 1])
async def test_others_leave_the_rollouts_of_a_lost_engine_to_its_standby_for_some_seconds(
    standby: int, start_rig: StartRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.fleet.fleet._WAKES_WITHIN_S", 1.0)
    engine = {"kind": "sim", "model": "sim", "num_replicas": 2, "standby": standby}
    rig = await start_rig(engine=engine, weights={"store": str(tmp_path)})
    victim, other = rig.fleet.replicas
    rollouts = [Rollout(request_id=name, model="sim", n=1, tokens=1) for name in ("first", "second", "third")]
    other.prompts.begin(rollouts[0])
    other.prompts.begin(rollouts[1])
    await rig.replicas[0].kill()
    await until(lambda: victim.state is ReplicaState.LOST)
    other.prompts.begin(rollouts[2])
    assert other.prompts.may_add(3) == (not standby)
    await until(lambda: other.prompts.may_add(3))


async def test_an_idle_engine_takes_its_share_of_the_rollouts_that_are_left_to_a_standby(
    start_rig: StartRig, tmp_path: Path
) -> None:
    engine = {"kind": "sim", "model": "sim", "num_replicas": 2, "standby": 1}
    rig = await start_rig(engine=engine, weights={"store": str(tmp_path)})
    victim, other = rig.fleet.replicas
    lost = [Rollout(request_id=f"lost-{number}", model="sim", n=1, tokens=1) for number in range(8)]
    for rollout in lost:
        victim.prompts.begin(rollout)
    rig.fleet.set_state(victim, ReplicaState.SUSPECT, "its connections broke, and its port is not closed yet")
    taken = 0
    while other.prompts.may_add(taken):
        other.prompts.begin(lost[taken])
        taken += 1
    assert taken == 4


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
