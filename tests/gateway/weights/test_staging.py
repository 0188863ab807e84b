"""Flat updates that are staged: rollouts go on until the swap, and a refused transfer has touched nothing."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engines.clients.vllm_engine import VllmEngine
from engines.errors import EngineFailed
from tests.rigs.rig import Rig, StartRig

Json = dict[str, Any]

ROOM = {"stage_bytes": 64}
"""As much as the simulated checkpoint has."""


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
    made: list[str] = []

    def noted(name: str) -> Callable[..., Awaitable[None]]:
        method = getattr(VllmEngine, name)

        async def call(self: VllmEngine, *args: Any, **named: Any) -> None:
            made.append(name)
            await method(self, *args, **named)

        return call

    for name in ("pause", "start_weight_update", "update_weights", "load_staged", "load_snapshot"):
        monkeypatch.setattr(VllmEngine, name, noted(name))
    return made


async def test_rollouts_are_placed_and_served_between_the_calls_of_an_update(rig: Rig, calls: list[str]) -> None:
    await receive(rig)
    assert await rig.states() == {"engine-0": "SERVING", "engine-1": "SERVING"}
    assert (await rig.complete([[5]]))["choices"][0]["weight_versions"] == [{"version": 0, "start": 0, "end": 8}]
    assert calls == []
    assert (await rig.post("/finish_weight_update", {}))[0] == 200
    assert sorted(calls) == ["load_staged"] * 2 + ["pause"] * 2 + ["start_weight_update"] * 2
    assert (await rig.complete([[5]]))["choices"][0]["weight_versions"][0]["version"] == 1


async def test_status_and_record_report_a_staged_update(rig: Rig) -> None:
    await receive(rig)
    assert (await rig.get("/status"))[1]["weight_update"]["staged"] is True
    await rig.post("/finish_weight_update", {})
    assert (await record(rig))["staged"] is True
    assert {"receipt", "transfer", "digests", "load", "canary"} <= (await record(rig))["seconds"].keys()


@pytest.mark.parametrize(
    ("odd", "weights"),
    [({"engine-1": {"stage_bytes": 63}}, {}), ({}, {"stage": "never"})],
    ids=["one replica without room", "weights.stage=never"],
)
async def test_all_replicas_stage_or_none(
    start_rig: StartRig, calls: list[str], odd: dict[str, Json], weights: Json
) -> None:
    rig = await start_rig(2, sim=ROOM, odd=odd, weights={"relay": "never", **weights})
    await rig.open_group()
    await rig.update()
    assert (await record(rig))["staged"] is False
    assert calls == ["pause"] * 2 + ["start_weight_update"] * 2 + ["update_weights"] * 2


async def test_replicas_of_several_workers_do_not_stage(rig: Rig) -> None:
    replica = rig.fleet.replicas[0]
    replica.info = dataclasses.replace(replica.info, world_size=2)
    assert (await rig.post("/start_weight_update", {}))[0] == 200
    assert (await rig.get("/status"))[1]["weight_update"]["staged"] is False


async def test_an_update_under_a_trainers_pause_is_not_staged(rig: Rig) -> None:
    await rig.post("/pause?mode=keep")
    await rig.update()
    assert (await record(rig))["staged"] is False
    await rig.post("/resume")
    assert (await rig.complete([[5]]))["choices"][0]["weight_versions"][0]["version"] == 1


async def test_other_bytes_on_one_replica_are_refused_before_an_engine_is_touched(rig: Rig, calls: list[str]) -> None:
    rig.replicas[1].damage("weight")
    await receive(rig)
    status, reply = await rig.post("/finish_weight_update", {})
    assert (status, "different bytes" in reply["error"]["message"]) == (424, True)
    assert await rig.states() == {"engine-0": "SERVING", "engine-1": "SERVING"}
    assert (await rig.complete([[5]]))["choices"][0]["weight_versions"][0]["version"] == 0
    assert calls == []


async def test_a_transfer_that_fails_stops_nothing(rig: Rig, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: VllmEngine, *_: Any) -> None:
        raise EngineFailed("its memory is full", replica_id=self.replica_id)

    running = asyncio.create_task(rig.complete([[5], [6]], max_tokens=60, ignore_eos=True))
    await rig.begun(2)
    with monkeypatch.context() as patch:
        patch.setattr(VllmEngine, "stage_weights", fail)
        await rig.post("/start_weight_update", {})
        assert (await rig.post("/update_weights", {"update_info": rig.tensors}))[0] == 424
    rig.go_on()
    spans = [choice["weight_versions"] for choice in (await running)["choices"]]
    assert spans == [[{"version": 0, "start": 0, "end": 60}]] * 2
    assert calls == []
    await rig.open_group()
    await rig.update()


async def test_a_trainer_that_gives_up_after_its_tensors_has_touched_nothing(rig: Rig, calls: list[str]) -> None:
    await receive(rig)
    async with rig.client.delete(f"{rig.url}/v1/weight_updates", json={"reason": "out of memory"}) as response:
        assert response.status == 200
    assert (await rig.complete([[5]]))["choices"][0]["weight_versions"][0]["version"] == 0
    assert calls == []
    await rig.open_group()
    await rig.update()


async def test_weights_that_the_canary_refuses_after_the_swap_are_taken_back(start_rig: StartRig) -> None:
    rig = await start_rig(2, sim=ROOM, odd={"engine-1": {"corrupt_after": 0}}, weights={"relay": "never"})
    await rig.open_group()
    await receive(rig)
    assert (await rig.post("/finish_weight_update", {}))[0] == 424
    await rig.until({"engine-0": "SERVING", "engine-1": "SERVING"})
    assert {replica.weight_version for replica in rig.fleet.replicas} == {0}


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
