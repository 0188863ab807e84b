"""min_version and max_staleness: what waits, what is refused at once, who is chosen, what the engine sees."""

import asyncio

import pytest

from tests.rigs.rig import Json, Rig, StartRig

CHAT: Json = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
COMPLETION: Json = {"prompt": [5, 6], "max_tokens": 4}
DIALECTS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


async def roll(rig: Rig, new: int, versions: dict[str, int]) -> None:
    """Have replicas hold and serve these versions."""
    rig.fleet.version = new
    for replica in rig.fleet.replicas:
        if (version := versions.get(replica.replica_id)) is not None:
            await replica.engine.ask("POST", "/update_weight_version", {"new_version": str(version)}, 5.0)
            replica.weight_version = version


def versions(reply: Json) -> set[int]:
    return {span["version"] for choice in reply["choices"] for span in choice["weight_versions"]}


async def placed(rig: Rig) -> dict[str, int]:
    _, status = await rig.get("/status")
    return {replica["replica_id"]: replica["samples_placed"] for replica in status["replicas"]}


@pytest.mark.parametrize(("path", "body"), DIALECTS)
async def test_a_version_to_come_is_waited_for(rig: Rig, path: str, body: Json) -> None:
    await rig.open_group()
    waiting = asyncio.create_task(rig.post(path, body | {"min_version": 1}))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await rig.complete([[5]])  # those without demands are not held up
    await rig.update()
    status, reply = await asyncio.wait_for(waiting, 20)
    assert (status, reply["choices"][0]["finish_reason"] in ("stop", "length")) == (200, True)


async def test_the_wait_is_bounded_and_names_field_value_and_version(start_rig: StartRig) -> None:
    rig = await start_rig(gateway={"queue_timeout_s": 0.2})
    status, reply = await rig.post("/v1/completions", COMPLETION | {"min_version": 7})
    assert status == 504
    for said in ("min_version = 7", "gateway.queue_timeout_s", "engine-0 SERVING version 0", "the newest is 0"):
        assert said in reply["error"]["message"]


@pytest.mark.parametrize(("path", "body"), DIALECTS)
@pytest.mark.parametrize("field", ["min_version", "max_staleness"])
@pytest.mark.parametrize("value", [-1, 1.5, "3", True, [1]])
async def test_what_is_no_number_is_refused_in_the_dialect(
    rig: Rig, path: str, body: Json, field: str, value: object
) -> None:
    status, reply = await rig.post(path, body | {field: value})
    assert (status, reply["error"]["param"]) == (400, field)
    assert f"{field} = {value!r}" in reply["error"]["message"]


@pytest.mark.parametrize(("path", "body"), DIALECTS)
async def test_a_version_that_a_frozen_model_never_has_is_refused_at_once(
    start_rig: StartRig, path: str, body: Json
) -> None:
    engines = {
        "policy": {"kind": "sim", "model": "sim", "num_replicas": 1},
        "judge": {"kind": "sim", "model": "judge", "num_replicas": 1, "frozen": True},
    }
    rig = await start_rig(engines=engines)
    async with asyncio.timeout(30):  # not that of the queue, which is minutes
        status, reply = await rig.post(path, body | {"model": "judge", "min_version": 1})
    assert (status, reply["error"]["param"]) == (400, "min_version")
    assert "frozen" in reply["error"]["message"]
    assert (await rig.post(path, body | {"model": "judge", "min_version": 0, "max_staleness": 0}))[0] == 200


async def test_the_least_version_chooses_among_replicas(rig: Rig) -> None:
    await roll(rig, 3, {"engine-0": 2, "engine-1": 3})
    assert versions(await rig.complete([[5]] * 6, min_version=3)) == {3}
    assert await placed(rig) == {"engine-0": 0, "engine-1": 6}


async def test_staleness_chooses_among_replicas_and_counts_the_update_under_way(rig: Rig) -> None:
    await roll(rig, 2, {"engine-0": 1, "engine-1": 2})
    assert versions(await rig.complete([[5]] * 4, max_staleness=0)) == {2}
    assert versions(await rig.complete([[5]] * 4, max_staleness=1)) == {1, 2}
    rig.fleet.update_to = 3
    assert versions(await rig.complete([[5]] * 4, max_staleness=1)) == {2}
    waiting = asyncio.create_task(rig.post("/v1/completions", COMPLETION | {"max_staleness": 0}))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await roll(rig, 3, {"engine-0": 3})
    rig.fleet.suspect(rig.fleet.replicas[1], "changes, so that the queue looks again")
    status, reply = await asyncio.wait_for(waiting, 20)
    assert (status, versions(reply)) == (200, {3})


async def test_a_full_fresh_replica_holds_up_those_who_need_it_and_nobody_else(start_rig: StartRig) -> None:
    rig = await start_rig()
    await roll(rig, 1, {"engine-0": 0, "engine-1": 1})
    body = {"max_tokens": 60, "ignore_eos": True}
    filling = asyncio.create_task(rig.complete([[5]] * 16, min_version=1, **body))
    await rig.begun(8)
    fresh = asyncio.create_task(rig.complete([[6]], min_version=1))
    await asyncio.sleep(0.1)
    assert versions(await asyncio.wait_for(rig.complete([[7]], max_tokens=1), 20)) == {0}
    assert not fresh.done()
    rig.hurry()
    await filling
    assert versions(await fresh) == {1}
