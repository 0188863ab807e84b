"""min_version and max_staleness: what waits, what is refused at once, what the engine sees."""

import asyncio

import pytest

from tests.rigs.rig import Json, Rig, StartRig

CHAT: Json = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
COMPLETION: Json = {"prompt": [5, 6], "max_tokens": 4}
DIALECTS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


def versions(reply: Json) -> set[int]:
    return {span["version"] for choice in reply["choices"] for span in choice["weight_versions"]}


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


async def test_staleness_counts_the_update_under_way(rig: Rig) -> None:
    await rig.open_group()
    await rig.update()
    await rig.complete([[5]], max_staleness=0)
    rig.fleet.begin(2)
    assert versions(await rig.complete([[5]] * 4, max_staleness=1)) == {1}
    waiting = asyncio.create_task(rig.post("/v1/completions", COMPLETION | {"max_staleness": 0}))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    rig.fleet.abort(2, "its trainer has left")
    rig.fleet.notify()
    status, reply = await asyncio.wait_for(waiting, 20)
    assert (status, versions(reply)) == (200, {1})
