"""Routes beside /generate for trainers written for SGLang, in front of simulated engines."""

import asyncio
from typing import Any

import pytest

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
    asking = [asyncio.create_task(rig.post("/generate", LONG | {"rid": rid})) for rid in ("one", "two")]
    await rig.begun(2)
    assert await text(rig, "/abort_request", {"rid": "one"}) == (200, "")
    assert await text(rig, "/abort_request", {"rid": "nobody"}) == (200, "")
    rig.hurry()
    (_, first), (_, second) = await asyncio.gather(*asking)
    assert (first["meta_info"]["finish_reason"]["type"], first["output_ids"]) == ("abort", [])
    assert len(second["output_ids"]) == 100


async def test_an_abort_of_nothing_is_refused(rig: Rig) -> None:
    status, reply = await rig.post("/abort_request", {"rid": ""})
    assert (status, reply["error"]["param"]) == (400, "rid")


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort", "wait", [], {}, 1, None])
async def test_generation_is_paused_in_sglangs_modes_and_no_other(rig: Rig, mode: Any) -> None:
    is_known = mode in ("in_place", "retract", "abort")
    status, reply = await rig.post("/pause_generation", {"mode": mode})
    assert status == (200 if is_known else 400)
    assert is_known or "abort, in_place, retract" in reply["error"]["message"]
    assert (await rig.get("/is_paused"))[1] == {"is_paused": is_known}


async def test_the_cache_is_flushed_with_either_method_unless_rollouts_hold_it(start_rig: StartRig) -> None:
    rig = await start_rig(num_replicas=2)
    for method in ("GET", "POST"):
        assert await text(rig, "/flush_cache", method=method) == (200, "Cache flushed.\n")
    running = asyncio.create_task(rig.post("/generate", LONG))
    await rig.begun()
    assert (await text(rig, "/flush_cache"))[0] == 400
    rig.hurry()
    await running


LONG_PROMPT: Json = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "return_token_ids": True}
CHAT: Json = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100, "ignore_eos": True}
TOKENS: Json = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 100, "ignore_eos": True}}
WAITING = [("/v1/completions", LONG_PROMPT), ("/v1/chat/completions", CHAT), ("/inference/v1/generate", TOKENS)]


async def abort_all(rig: Rig) -> None:
    assert await text(rig, "/abort_request", {"abort_all": True}) == (200, "")


@pytest.mark.parametrize(("path", "body"), [*WAITING, ("/generate", LONG)])
async def test_abort_all_ends_waiting_streams_of_every_dialect(rig: Rig, path: str, body: Json) -> None:
    await rig.post("/pause?mode=keep", None)
    usage = {} if path == "/generate" else {"stream_options": {"include_usage": True}}
    waiting = asyncio.create_task(rig.stream(path, body | usage))
    await rig.in_line(1)
    await abort_all(rig)
    told = await waiting
    if path == "/generate":
        assert [(one["meta_info"]["finish_reason"]["type"], one["output_ids"]) for one in told] == [("abort", [])]
    else:
        end, last = told
        assert [choice["finish_reason"] for choice in end["choices"]] == ["abort"]
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 0)
    await rig.post("/resume", None)


def made_of(told: Any) -> tuple[list[int], str, list[Json]]:
    """Tokens, end and spans of the one sample of a reply or a stream, of any dialect."""
    chunks = told if isinstance(told, list) else [told]
    if "output_ids" in chunks[-1]:
        meta = chunks[-1]["meta_info"]
        return chunks[-1]["output_ids"], meta["finish_reason"]["type"], meta["weight_versions"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    made = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
    return made, choices[-1]["finish_reason"], choices[-1]["weight_versions"]


@pytest.mark.parametrize(
    ("path", "body", "is_stream"),
    [
        (*one, is_stream)
        for one in [*WAITING, ("/generate", LONG)]
        for is_stream in (False, True)
        if one[1] is not CHAT or not is_stream
    ],
)
async def test_abort_all_keeps_the_tokens_of_a_rollout_whose_rest_waits(
    start_rig: StartRig, path: str, body: Json, is_stream: bool
) -> None:
    rig = await start_rig(2)
    asked = body if path == "/generate" else body | {"return_token_ids": True}
    call = rig.stream(path, asked) if is_stream else rig.post(path, asked)
    running = asyncio.create_task(call)
    await rig.begun(tokens=12)
    busy = next(replica.replica_id for replica in rig.fleet.replicas if replica.load_samples)
    for replica in rig.fleet.replicas:  # nobody takes the rest
        replica.backoff.busy(60.0)
    await next(one for one in rig.replicas if one.info.replica_id == busy).kill()
    await rig.in_line(1)
    await abort_all(rig)
    told = await running
    made, end, spans = made_of(told if is_stream else told[1])
    assert (len(made), end) == (12, "abort")
    assert [(int(span["version"]), span["start"], span["end"]) for span in spans] == [(0, 0, 12)]
