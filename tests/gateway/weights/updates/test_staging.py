"""Flat updates that are staged: rollouts go on until the swap, and a refused transfer has touched nothing."""

import asyncio
import dataclasses
from typing import Any

import pytest

from sim.model import SimModel
from tests.rigs.calls import note_calls
from tests.rigs.rig import Rig, StartRig

Json = dict[str, Any]

ROOM = {"stage_bytes": 64}
"""As much as the simulated checkpoint has."""
BOTH_SERVE = {"engine-0": "SERVING", "engine-1": "SERVING"}


@pytest.fixture
async def rig(start_rig: StartRig) -> Rig:
    rig = await start_rig(2, sim=ROOM, weights={"relay": "never"})
    await rig.open_group()
    return rig


async def record(rig: Rig) -> Json:
    report: Json = (await rig.get("/v1/weight_updates"))[1]["weight_updates"][0]
    return report


async def receive(rig: Rig) -> None:
    for path, body in (("/start_weight_update", {}), ("/update_weights", {"update_info": rig.tensors})):
        status, reply = await rig.post(path, body)
        assert status == 200, reply


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that stop, overwrite or restore engines, as they are made."""
    stops = ("pause", "start_weight_update", "update_weights", "load_staged")
    return note_calls(monkeypatch, *stops, "load_snapshot")


async def test_rollouts_are_placed_and_served_between_the_calls_of_an_update(rig: Rig, calls: list[str]) -> None:
    await receive(rig)
    status = (await rig.get("/status"))[1]
    assert (await rig.states(), status["weight_update"]["staged"]) == (BOTH_SERVE, True)
    assert (await rig.complete([[5]]))["choices"][0]["weight_versions"][0]["version"] == 0
    assert calls == []
    assert (await rig.post("/finish_weight_update", {}))[0] == 200
    assert (await record(rig))["staged"] is True
    assert sorted(calls) == ["load_staged"] * 2 + ["pause"] * 2 + ["start_weight_update"] * 2
    assert (await rig.complete([[5]]))["choices"][0]["weight_versions"][0]["version"] == 1


@pytest.mark.parametrize(
    ("odd", "weights", "reason"),
    [
        ({"engine-1": {"stage_bytes": 63}}, {}, "no room for 0.0 GB beside the weights of engine-1"),
        ({}, {"stage": "never"}, "weights.stage is never"),
    ],
    ids=["one replica without room", "weights.stage=never"],
)
async def test_all_replicas_stage_or_none_and_the_record_says_why(
    start_rig: StartRig, calls: list[str], odd: dict[str, Json], weights: Json, reason: str
) -> None:
    rig = await start_rig(2, sim=ROOM, odd=odd, weights={"relay": "never", **weights})
    await rig.open_group()
    await rig.update()
    assert (await record(rig))["unstaged"] == reason
    assert calls == ["pause"] * 2 + ["start_weight_update"] * 2 + ["update_weights"] * 2


@pytest.mark.parametrize(("stage_bytes", "is_staged"), [(127, False), (128, True)])
async def test_tensors_that_are_wider_than_the_checkpoints_are_staged_where_they_fit_too(
    start_rig: StartRig, calls: list[str], stage_bytes: int, is_staged: bool
) -> None:
    rig = await start_rig(2, sim={"stage_bytes": stage_bytes}, weights={"relay": "never", "in_flight": "drain"})
    await rig.open_group()
    assert (await rig.post("/start_weight_update", {}))[0] == 200
    wide = rig.tensors | {"dtype_names": ["float64"] * len(rig.tensors["names"])}
    assert (await rig.post("/update_weights", {"update_info": wide}))[0] == 200
    assert (await rig.get("/status"))[1]["weight_update"]["staged"] is is_staged
    assert await rig.states() == (BOTH_SERVE if is_staged else dict.fromkeys(BOTH_SERVE, "UPDATING"))
    assert (await rig.post("/finish_weight_update", {}))[0] == 200
    assert calls.count("load_staged") == 2 * is_staged
    assert (await rig.complete([[5]]))["choices"][0]["weight_versions"][0]["version"] == 1


async def test_an_engine_without_our_code_says_so_and_not_that_it_has_no_room(rig: Rig) -> None:
    replica = rig.fleet.replicas[1]
    replica.info = dataclasses.replace(replica.info, has_tee=False)
    await rig.update()
    assert (await record(rig))["unstaged"].startswith("engine-1 runs without our plugin, or is a vLLM that")


async def test_an_update_under_a_trainers_pause_is_not_staged(rig: Rig) -> None:
    await rig.post("/pause?mode=keep")
    await rig.update()
    assert (await record(rig))["unstaged"] == "the trainer has paused generation"
    await rig.post("/resume")
    assert (await rig.complete([[5]]))["choices"][0]["weight_versions"][0]["version"] == 1


async def test_other_bytes_on_one_replica_are_refused_before_an_engine_is_touched(rig: Rig, calls: list[str]) -> None:
    rig.replicas[1].damage("weight")
    await receive(rig)
    status, reply = await rig.post("/finish_weight_update", {})
    assert (status, "different bytes" in reply["error"]["message"]) == (424, True)
    assert (await rig.states(), calls) == (BOTH_SERVE, [])


@pytest.fixture
async def refusing(start_rig: StartRig) -> Rig:
    """A rig whose second replica computes with garbage after its first update."""
    odd = {"engine-1": {"corrupt_after": 0, "corrupt": "garbage"}}
    rig = await start_rig(2, sim=ROOM, odd=odd, weights={"relay": "never"})
    await rig.open_group()
    return rig


async def refused(rig: Rig) -> Json:
    """Have an update refused by the canary, after its swap; return its record once both replicas serve again."""
    await receive(rig)
    assert (await rig.post("/finish_weight_update", {}))[0] == 424
    await rig.until(BOTH_SERVE)
    return await record(rig)


async def check_serves_the_checkpoint(rig: Rig) -> None:
    """Both replicas serve version 0, and compute with it."""
    assert {replica.weight_version for replica in rig.fleet.replicas} == {0}
    expected = SimModel.of(rig.sim).complete([5], max_tokens=8)
    for replica in rig.fleet.replicas:
        body = {"prompt": [5], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        reply = await replica.engine.generate("/v1/completions", body, 10.0)
        assert reply["choices"][0]["token_ids"] == expected


async def test_weights_that_the_canary_refuses_after_the_swap_are_loaded_anew(refusing: Rig, calls: list[str]) -> None:
    await refused(refusing)
    await check_serves_the_checkpoint(refusing)
    assert calls.count("load_snapshot") == 2
    await refusing.open_group()


async def test_a_drain_waits_at_the_swap_and_not_before(start_rig: StartRig) -> None:
    rig = await start_rig(1, sim=ROOM, weights={"in_flight": "drain"})
    await rig.open_group()
    running = asyncio.create_task(rig.complete([[5]], max_tokens=60, ignore_eos=True))
    await rig.begun()
    await receive(rig)
    finishing = asyncio.create_task(rig.post("/finish_weight_update", {}))
    while not (await rig.get("/status"))[1]["gate_closed_for"]:
        await asyncio.sleep(0.01)
    assert not finishing.done()
    rig.hurry()
    assert (await finishing)[0] == 200
    assert (await running)["choices"][0]["weight_versions"] == [{"version": 0, "start": 0, "end": 60}]
