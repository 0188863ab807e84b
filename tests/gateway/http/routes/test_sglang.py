"""Routes beside /generate for trainers written for SGLang, in front of simulated engines."""

import asyncio
from typing import Any

import pytest

from gateway.http.routes.sglang import REFUSED
from tests.rigs.rig import Json, Rig, StartRig

LONG = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}


async def text(rig: Rig, path: str, body: Any = None, method: str = "POST") -> tuple[int, str]:
    async with rig.client.request(method, rig.url + path, json=body) as response:
        return response.status, await response.text()


async def test_the_gateway_is_the_one_worker_and_takes_what_a_trainer_sends_there(rig: Rig) -> None:
    status, reply = await rig.get("/workers")
    (worker,) = reply["workers"]
    assert (status, worker["url"], worker["is_healthy"]) == (200, rig.url, True)
    assert reply["stats"]["regular_count"] == reply["total"] == 1
    assert (await rig.get("/list_workers"))[1] == {"urls": [rig.url]}


async def test_abort_all_ends_what_runs_with_its_tokens_and_what_waits_with_none(start_rig: StartRig) -> None:
    rig = await start_rig(num_replicas=1)
    room = rig.fleet.replicas[0].info.max_num_seqs
    asked = [asyncio.create_task(rig.post("/generate", LONG)) for _ in range(room + 40)]
    await rig.begun(room)
    assert await text(rig, "/abort_request", {"abort_all": True}) == (200, "")
    replies = [reply for _, reply in await asyncio.gather(*asked)]
    assert {reply["meta_info"]["finish_reason"]["type"] for reply in replies} == {"abort"}
    assert any(reply["output_ids"] for reply in replies)
    assert all(len(reply["output_ids"]) < 100 for reply in replies)
    assert {reply["meta_info"]["weight_version"] for reply in replies} == {"0"}
    rig.hurry()
    whole = (await rig.post("/generate", LONG))[1]
    assert len(whole["output_ids"]) == 100, "the gate is open again"


async def test_abort_all_leaves_a_fleet_paused_that_was(rig: Rig) -> None:
    await rig.post("/pause?mode=keep", None)
    waiting = asyncio.create_task(rig.post("/generate", LONG))
    await asyncio.sleep(0.05)
    assert (await text(rig, "/abort_request", {"abort_all": True}))[0] == 200
    assert (await waiting)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await rig.get("/is_paused"))[1] == {"is_paused": True}
    await rig.post("/continue_generation", None)
    assert (await rig.get("/is_paused"))[1] == {"is_paused": False}


async def test_one_request_is_taken_back_by_its_id_and_the_others_go_on(start_rig: StartRig) -> None:
    rig = await start_rig(num_replicas=1)
    batch = asyncio.create_task(rig.post("/generate", LONG | {"input_ids": [[5], [6]], "rid": ["one", "two"]}))
    await rig.begun(2)
    assert await text(rig, "/abort_request", {"rid": "one"}) == (200, "")
    assert await text(rig, "/abort_request", {"rid": "nobody"}) == (200, "")
    rig.hurry()
    replies: Any = (await batch)[1]
    first, second = replies
    assert (first["meta_info"]["finish_reason"]["type"], first["output_ids"]) == ("abort", [])
    assert len(second["output_ids"]) == 100


async def test_an_abort_of_nothing_is_refused(rig: Rig) -> None:
    status, reply = await rig.post("/abort_request", {"rid": ""})
    assert (status, reply["error"]["param"]) == (400, "rid")


async def test_the_cache_is_flushed_with_either_method_unless_rollouts_hold_it(start_rig: StartRig) -> None:
    rig = await start_rig(num_replicas=2)
    for method in ("GET", "POST"):
        assert await text(rig, "/flush_cache", method=method) == (200, "Cache flushed.\n")
    running = asyncio.create_task(rig.post("/generate", LONG))
    await rig.begun()
    assert (await text(rig, "/flush_cache"))[0] == 400
    rig.hurry()
    await running


async def test_the_server_tells_its_model_and_replicas(rig: Rig) -> None:
    info = (await rig.get("/get_server_info"))[1]
    assert (info["served_model_name"], info["context_length"], info["status"]) == ("sim", 128, "ready")
    assert [state["state"] for state in info["internal_states"]] == ["SERVING", "SERVING"]
    assert (await rig.get("/get_weight_version"))[1] == {"weight_version": "0"}


@pytest.mark.parametrize(("mode", "known"), [("in_place", True), ("retract", True), ("abort", True), ("wait", False)])
async def test_generation_is_paused_in_sglangs_modes(rig: Rig, mode: str, known: bool) -> None:
    status, _ = await rig.post("/pause_generation", {"mode": mode})
    assert status == (200 if known else 400)
    assert (await rig.get("/is_paused"))[1] == {"is_paused": known}


@pytest.mark.parametrize("path", [*REFUSED, "/workers", "/workers/w1"])
async def test_what_makes_no_sense_at_a_router_is_refused_with_another_way(rig: Rig, path: str) -> None:
    status, reply = await rig.post(path, {"url": "http://127.0.0.1:1"})
    assert status == 404
    message: Json = reply["error"]["message"]
    assert path in message
    assert any(way in message for way in ("rollout-gateway up", "trainer_client", "own their GPUs"))
