"""Weight updates over a fleet: the order of calls, what each wrong call answers, and what is served after a failure."""

import asyncio
import dataclasses

import pytest

from engines.types import Dialect
from tests.rigs.calls import until
from tests.rigs.rig import Json, Rig, StartRig


@pytest.mark.parametrize("call", ["start_weight_update", "update_weights", "finish_weight_update"])
async def test_a_weight_call_before_init_or_start_is_a_conflict(rig: Rig, call: str) -> None:
    status, reply = await rig.post(f"/{call}", {"update_info": rig.tensors})
    assert status == 409
    assert "first" in reply["error"]["message"]
    await rig.complete([[5]])


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"in_flight": "abort everything"}, 400, "keep, recompute, drain"),
        *(({"version": version}, 400 if not version else 409, "version") for version in (0, 2)),
        *(({"group": group}, 400, "group") for group in ("", 7, "x" * 301)),
    ],
    ids=lambda value: f"{value!s:.30}",
)
async def test_a_start_that_is_wrong_says_why_and_opens_nothing(rig: Rig, body: Json, status: int, said: str) -> None:
    await rig.open_group()
    answered, reply = await rig.post("/start_weight_update", body)
    assert (answered, said in reply["error"]["message"]) == (status, True), reply
    assert (await rig.get("/status"))[1]["weight_update"] is None
    assert (await rig.post("/start_weight_update", {"version": 1}))[0] == 200
    status, reply = await rig.post("/start_weight_update", {})
    assert (status, "open since" in reply["error"]["message"]) == (409, True)


async def test_calls_of_a_trainer_whose_group_another_has_replaced_leave_its_update_as_it_is(rig: Rig) -> None:
    place = {"group": "127.0.0.1:1"}
    status, reply = await rig.post("/start_weight_update", place)
    assert (status, "is gone, as after a restart of the gateway" in reply["error"]["message"]) == (424, True)
    for info in (INIT, INIT | {"master_port": 2}):
        assert (await rig.post("/init_weight_transfer_engine", {"init_info": info}))[0] == 200
    tensors = {"update_info": rig.tensors}
    other = {"group": "127.0.0.1:2"}
    assert (await rig.post("/start_weight_update", other))[0] == 200
    for path, body in (("/start_weight_update", {}), ("/update_weights", tensors), ("/finish_weight_update", {})):
        status, reply = await rig.post(path, body | place)
        assert (status, "another trainer has opened one, of 127.0.0.1:2" in reply["error"]["message"]) == (409, True)
    async with rig.client.delete(f"{rig.url}/v1/weight_updates", json=place) as refused:
        assert refused.status == 409
    assert (await rig.post("/update_weights", tensors | other))[0] == 200
    assert (await rig.post("/finish_weight_update", other))[1]["weight_version"] == 1


async def test_an_update_that_its_trainer_gives_up_is_over_at_once(rig: Rig) -> None:
    await rig.open_group()
    await rig.update()
    await rig.post("/start_weight_update", {})
    async with rig.client.delete(f"{rig.url}/v1/weight_updates", json={"reason": "out of memory"}) as response:
        assert (response.status, await response.json()) == (200, {"weight_version": 1})
    await rig.complete([[5]])
    _, updates = await rig.get("/v1/weight_updates")
    assert updates["weight_updates"][0]["error"] == "the trainer gave it up: out of memory"
    status, reply = await rig.post("/start_weight_update", {})
    assert (status, "no transfer group" in reply["error"]["message"]) == (409, True)


async def test_what_is_served_is_told_before_anything_is_sent(start_rig: StartRig) -> None:
    rig = await start_rig(1, sim={"tensors": {"w": [4, 2], "b": [4]}})
    _, told = await rig.get("/v1/weights")
    tensors = [{"name": "w", "dtype": "float32", "shape": [4, 2]}, {"name": "b", "dtype": "float32", "shape": [4]}]
    assert (told["model"], told["weight_version"], told["tensors"]) == ("sim", 0, tensors)
    (replica,) = told["replicas"]
    assert (replica["replica_id"], replica["kind"], replica["gpus"]) == ("engine-0", "sim", [])


INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3, "packed": True}
SGLANG = {"dialect": Dialect.SGLANG}
BARE = SGLANG | {"has_tee": False}


@pytest.mark.parametrize(
    ("info", "replica", "status", "said"),
    [
        ({"world_size": 2}, {}, 409, "needs 3"),
        *(({"rank_offset": offset}, {}, 400, "rank_offset") for offset in (None, "1", 1.5, [1], True)),
        ({}, {"url": "http://10.0.0.9:8000"}, 409, "engine-1 (http://10.0.0.9:8000) cannot find the trainer"),
        ({"packed": False}, SGLANG, 409, "engine-1 of SGLang cannot be in a transfer group, as it takes no broadcasts"),
        ({}, BARE, 409, "engine-1 of SGLang cannot be in a transfer group, as it runs without our plugin"),
        ({}, BARE | {"reload_reason": "lora: x"}, 409, "as it leaves updates to SGLang: lora: x"),
    ],
)
async def test_a_group_that_cannot_be_is_refused_at_init(
    rig: Rig, info: Json, replica: Json, status: int, said: str
) -> None:
    other = rig.fleet.replicas[1]
    other.info = dataclasses.replace(other.info, **replica)
    answered, reply = await rig.post("/init_weight_transfer_engine", {"init_info": INIT | info})
    assert (answered, said in reply["error"]["message"]) == (status, True), reply


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"names": ["nonsense"]}, "update_info.names"),
        ({"shapes": [[9, 9]]}, "update_info.shapes"),
        ({"names": ["weight", "more"]}, "update_info"),
        ({"shapes": [5]}, "update_info"),
        ({"names": [["weight"]]}, "update_info"),
        ({"names": [1]}, "update_info"),
        ({"dtype_names": 5}, "update_info.dtype_names"),
    ],
    ids=str,
)
async def test_tensors_of_another_model_are_refused_before_anything_is_overwritten(
    rig: Rig, change: Json, param: str
) -> None:
    await rig.open_group()
    await rig.post("/start_weight_update", {})
    status, reply = await rig.post("/update_weights", {"update_info": rig.tensors | change})
    assert (status, reply["error"]["param"]) == (400, param)
    assert await rig.states() == {"engine-0": "SERVING", "engine-1": "SERVING"}
    assert (await rig.get("/status"))[1]["weight_update"] is None
    assert (await rig.complete([[5]]))["choices"][0]["weight_versions"][0]["version"] == 0
    await rig.open_group()
    await rig.update()


async def test_a_finish_without_tensors_leaves_the_version(rig: Rig) -> None:
    await rig.open_group()
    await rig.post("/start_weight_update", {})
    status, reply = await rig.post("/finish_weight_update", {})
    assert (status, reply["weight_version"]) == (200, 0)
    await rig.complete([[5]])


async def test_rollouts_go_on_until_an_engine_is_touched_and_have_the_new_version_after(rig: Rig) -> None:
    await rig.open_group()
    await rig.post("/start_weight_update", {})
    assert (await rig.complete([[5]]))["choices"][0]["weight_versions"][0]["version"] == 0
    await rig.post("/update_weights", {"update_info": rig.tensors})
    waiting = asyncio.create_task(rig.complete([[5]]))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await rig.post("/finish_weight_update", {})
    assert (await waiting)["choices"][0]["weight_versions"][0]["version"] == 1


@pytest.mark.parametrize("asked", [{"in_flight": "drain"}, {}], ids=["asked", "configured"])
async def test_an_update_may_wait_for_rollouts_in_flight(start_rig: StartRig, asked: Json) -> None:
    rig = await start_rig(weights={} if asked else {"in_flight": "drain"})
    await rig.open_group()
    running = asyncio.create_task(rig.complete([[5]], max_tokens=40, ignore_eos=True))
    await rig.begun()
    starting = asyncio.create_task(rig.post("/start_weight_update", asked))
    await asyncio.sleep(0.1)
    assert not starting.done()
    rig.hurry()
    assert (await starting)[0] == 200
    choice = (await running)["choices"][0]
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 40}]


async def test_a_drain_that_takes_too_long_answers_504_and_serving_goes_on(start_rig: StartRig) -> None:
    rig = await start_rig(weights={"in_flight": "drain", "drain_timeout_s": 0.2})
    await rig.open_group()
    running = asyncio.create_task(rig.complete([[5]], max_tokens=30, ignore_eos=True))
    await rig.begun()
    status, reply = await rig.post("/start_weight_update", {})
    assert status == 504
    assert "weights.drain_timeout_s" in reply["error"]["message"]
    await rig.complete([[6]], max_tokens=1)
    rig.hurry()
    await running


async def test_a_broken_group_is_refused_with_the_remedy(rig: Rig) -> None:
    await rig.open_group()
    await rig.update()
    await rig.replicas[0].kill()
    await until(rig.states, lambda got: got.get("engine-0") != "SERVING")
    status, reply = await rig.post("/start_weight_update", {})
    assert status == 424
    assert "/init_weight_transfer_engine" in reply["error"]["message"]
    assert "engine-0" in reply["error"]["message"]


async def test_a_weight_call_during_another_is_a_conflict(start_rig: StartRig) -> None:
    rig = await start_rig()
    await rig.open_group()
    running = asyncio.create_task(rig.complete([[5]], max_tokens=30, ignore_eos=True))
    await rig.begun()
    first = asyncio.create_task(rig.post("/start_weight_update", {"in_flight": "drain"}))
    await until(lambda: rig.get("/status"), lambda got: got[1]["weight_update"] is not None)
    status, reply = await rig.post("/start_weight_update", {})
    assert status == 409
    assert "still running" in reply["error"]["message"]
    rig.hurry()
    assert (await first)[0] == 200
    await running


async def test_pause_holds_rollouts_until_resume(rig: Rig) -> None:
    status, reply = await rig.post("/pause?mode=sideways")
    assert (status, reply["error"]["param"]) == (400, "mode")
    assert (await rig.post("/pause?mode=keep"))[0] == 200
    assert await rig.get("/is_paused") == (200, {"is_paused": True})
    waiting = asyncio.create_task(rig.complete([[5]]))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await rig.post("/resume")
    await waiting
    assert await rig.get("/is_paused") == (200, {"is_paused": False})


async def test_a_part_of_what_vllm_holds_together_is_no_update(start_rig: StartRig) -> None:
    attention = [f"model.layers.0.self_attn.{part}.weight" for part in ("q_proj", "k_proj", "o_proj")]
    rig = await start_rig(sim={"tensors": {name: [4, 4] for name in attention}}, weights={"relay": "never"})
    await rig.open_group()

    async def send(*names: str) -> tuple[int, Json]:
        announced = {"names": list(names), "dtype_names": ["float32"] * len(names), "shapes": [[4, 4]] * len(names)}
        await rig.post("/start_weight_update", {})
        await rig.post("/update_weights", {"update_info": announced})
        return await rig.post("/finish_weight_update", {})

    status, reply = await send(attention[0], attention[2])
    assert status == 400
    assert (
        "has 'model.layers.0.self_attn.q_proj.weight' without 'model.layers.0.self_attn.k_proj.weight'"
        in (reply["error"]["message"])
    )
    await rig.until({"engine-0": "SERVING", "engine-1": "SERVING"})
    await rig.open_group()
    assert (await send(attention[2]))[0] == 200
    assert (await send(*attention[:2]))[0] == 200


async def test_a_group_that_lacks_a_replica_is_opened_again_by_a_trainer_that_names_it(start_rig: StartRig) -> None:
    rig = await start_rig(1, weights={"relay": "never"})
    await rig.open_group()
    await rig.update()
    await rig.add_replica("engine-1")
    await rig.until({"engine-0": "SERVING", "engine-1": "SYNCING"})
    await until(lambda: "waits for the next update" in rig.fleet.replicas[-1].reason)
    status, reply = await rig.post("/start_weight_update", {"group": "127.0.0.1:1"})
    assert (status, "the group lacks replica engine-1" in reply["error"]["message"]) == (424, True)
    await rig.update()  # as TRL, which cannot open another
    reason = next(one["reason"] for one in (await rig.get("/status"))[1]["replicas"] if one["weight_version"] == 0)
    assert "takes part once a new one is opened" in reason
    await rig.open_group()
    await rig.update()
    assert await rig.states() == {"engine-0": "SERVING", "engine-1": "SERVING"}
