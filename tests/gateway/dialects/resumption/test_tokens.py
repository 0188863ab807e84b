"""A sample that an update with `in_flight: abort` cuts off resumes from its tokens, or restarts from its prompt."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gateway.dialects.resumption import rest_sampling, whole_characters
from gateway.dialects.sample import joined_spans
from sim import server as sim_server
from sim.dialect import rendered
from sim.model import SimModel
from tests.rigs.rig import Rig, StartRig

Json = dict[str, Any]

LONG = 80
BODY: Json = {"model": "sim", "prompt": [5, 6], "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"


def span(version: int, start: int | None, end: int | None) -> Json:
    return {"version": version, "start": start, "end": end}


def test_the_rest_may_have_what_the_whole_has_left() -> None:
    body = {"n": 4, "max_tokens": 10, "min_tokens": 6, "request_id": "a", "top_p": 0.9}
    assert rest_sampling(body, [3, 4], 0) == {"n": 1, "max_tokens": 8, "min_tokens": 4, "top_p": 0.9}
    later = rest_sampling(body, [1] * 8, 0)
    assert (later["max_tokens"], "min_tokens" in later) == (2, False)


def test_spans_without_limits_stay_so() -> None:
    first = [span(1, None, None), span(2, None, None)]
    assert joined_spans(first, [span(2, 0, 3)], 4) == [*first, span(2, 4, 7)]
    assert joined_spans([span(1, 0, 4)], first, 4) == [span(1, 0, 4), *first]
    assert joined_spans(first, [span(2, None, None), span(3, None, None)], 4) == [*first, span(3, None, None)]
    assert joined_spans(first, [span(2, 0, 3)], 0) == [span(2, 0, 3)], "no token of the first is kept"


@pytest.mark.parametrize(
    ("made", "kept"),
    [("né", "né"), ("né"[:1] + "é", "né"), ("", "")],
)
async def test_whole_characters_stay(made: str, kept: str) -> None:
    assert bytes(await whole_characters(list(made.encode()), as_bytes)).decode() == kept


@pytest.mark.parametrize(("missing", "text"), [(1, "né"), (1, "n€"), (2, "n€"), (3, "n\N{GRINNING FACE}")])
async def test_the_first_bytes_of_a_character_are_made_again(missing: int, text: str) -> None:
    assert bytes(await whole_characters(list(text.encode()[:-missing]), as_bytes)) == b"n"


async def test_what_never_becomes_a_character_stays() -> None:
    assert await whole_characters([255] * 6, as_bytes) == [255] * 6


async def as_bytes(token_ids: list[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


async def started(start_rig: StartRig, replicas: int = 2, **weights: Any) -> Rig:
    rig = await start_rig(replicas, sim={"decode_step_s": 0.02}, weights={"in_flight": "abort"} | weights)
    await rig.open_group()
    return rig


async def posted(rig: Rig, path: str, body: Json) -> Json:
    status, reply = await rig.post(path, body)
    assert status == 200, reply
    return reply


async def cut_off(rig: Rig, path: str, body: Json) -> Json:
    """The choice of a reply that an update cuts off."""
    running = asyncio.create_task(posted(rig, path, body))
    await rig.begun()
    await rig.update()
    rig.hurry()
    [told] = (await running)["choices"]
    return dict(told)


def seam(told: Json, end: int = LONG) -> int:
    """Where the new weights begin."""
    old, new = told["weight_versions"]
    assert (int(old["version"]), old["start"], int(new["version"]), new["end"]) == (0, 0, 1, end)
    assert 0 < old["end"] == new["start"] < end
    return int(old["end"])


def expected(rig: Rig, boundary: int, prompt: list[int], length: int = LONG) -> list[int]:
    """The text of the old weights up to the boundary, and of the new weights after that."""
    versions = ["default"] * boundary + ["1"] * (length - boundary)
    return SimModel.of(rig.sim).complete(prompt, versions=versions, max_tokens=length, ignore_eos=True)


def token_body(**sampling: Any) -> Json:
    asked = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True} | sampling
    return {"token_ids": [5, 6], "sampling_params": asked}


def chat_body(**fields: Any) -> Json:
    asked = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True} | fields
    return {"messages": [{"role": "user", "content": "hi"}], **asked}


async def test_a_conversations_default_limit_holds_for_the_whole_of_it(start_rig: StartRig) -> None:
    """vLLM's rendered parameters leave out `max_tokens` where it is 16."""
    rig = await start_rig(2, sim={"decode_step_s": 0.05}, weights={"in_flight": "abort"})
    await rig.open_group()
    told = await cut_off(rig, CHAT, chat_body(max_tokens=16))
    seam(told, 16)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body(stop=["never"])),
        (CHAT, chat_body(a_field_of_tomorrow=1)),
        (CHAT, chat_body(parallel_tool_calls=False)),
        (TOKENS, token_body(stop=["never"])),
        (TOKENS, token_body() | {"output_mode": "text"}),
    ],
)
async def test_conversations_and_token_ids_that_cannot_go_on_are_made_again(
    start_rig: StartRig, path: str, body: Json
) -> None:
    rig = await started(start_rig)
    told = await cut_off(rig, path, body)
    [made] = told["weight_versions"]
    assert (int(made["version"]), made["start"], made["end"], told["finish_reason"]) == (1, 0, LONG, "length")


@pytest.mark.parametrize(
    "takes_apart", [True, False], ids=["its prompt reads otherwise now", "no engine takes it apart"]
)
async def test_a_conversation_that_cannot_go_on_is_made_again(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, *, takes_apart: bool
) -> None:
    rig = await started(start_rig)
    if takes_apart:
        monkeypatch.setattr(sim_server, "rendered", lambda body, limit: rendered(body, limit) | {"token_ids": [5, 6]})
    else:
        for replica in rig.fleet.replicas:
            replica.info = replace(replica.info, capabilities=frozenset())
    told = await cut_off(rig, CHAT, chat_body())
    assert told["weight_versions"] == [span(1, 0, LONG)]


async def test_a_stream_that_cannot_go_on_ends_with_what_it_has_told(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    running = [
        asyncio.create_task(rig.stream(CHAT, chat_body())),
        asyncio.create_task(rig.stream(COMPLETIONS, BODY | {"stop": ["never"]})),
    ]
    await rig.begun(2)
    await rig.update()
    rig.hurry()
    for chunks in await asyncio.gather(*running):
        (told,) = chunks[-1]["choices"]
        assert told["finish_reason"] == "abort"
        assert [span["version"] for span in told["weight_versions"]] == [0]


async def test_a_stream_that_has_told_nothing_begins_again(start_rig: StartRig) -> None:
    rig = await start_rig(1, weights={"in_flight": "abort"})
    await rig.open_group()
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "ignore_eos": True}
    short = BODY | {"max_tokens": 2}
    running = [
        asyncio.create_task(rig.stream(CHAT, chat)),
        asyncio.create_task(rig.stream(COMPLETIONS, short | {"stop": ["never"]})),
        asyncio.create_task(rig.stream(COMPLETIONS, short)),
        asyncio.create_task(rig.stream(COMPLETIONS, short | {"n": 2, "temperature": 1.0})),
    ]
    await rig.begun(5, tokens=0)
    await rig.post("/start_weight_update", {})
    await rig.post("/update_weights", {"update_info": rig.tensors})
    rig.hurry()
    assert (await rig.post("/finish_weight_update", {}))[0] == 200
    for chunks in await asyncio.gather(*running):
        ends = [one for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
        assert {one["finish_reason"] for one in ends} == {"length"}
        assert [one["weight_versions"] for one in ends] == [[span(1, 0, 2)]] * len(ends)
        openings = [one for chunk in chunks for one in chunk["choices"] if (one.get("delta") or {}).get("role")]
        assert len(openings) <= 1


@pytest.mark.parametrize("resumes", [True, False])
async def test_samples_of_a_stream_that_an_update_meets_before_their_first_token_are_not_left_out(
    start_rig: StartRig, *, resumes: bool
) -> None:
    """The engine runs 8 samples of 10 at once: the other two are made beside the rests, or the stream is an error."""
    rig = await start_rig(1, weights={"in_flight": "abort"})
    await rig.open_group()
    body = BODY | {"n": 10, "temperature": 1.0, "return_token_ids": True} | ({} if resumes else {"stop": ["never"]})
    running = asyncio.create_task(rig.stream(COMPLETIONS, body))
    await rig.begun(8)
    await rig.update()
    rig.hurry()
    *chunks, last = await running
    if not resumes:
        assert "was cut off and cannot continue" in last["error"]["message"]
        return
    made = [one for chunk in (*chunks, last) for one in chunk["choices"]]
    for index in range(10):
        mine = [one for one in made if one["index"] == index]
        assert sum(len(one["token_ids"]) for one in mine) == LONG
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["length"]
        assert mine[-1]["weight_versions"][-1]["version"] == 1


async def test_what_an_update_has_cut_off_goes_on_with_the_old_weights_where_it_fails(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    running = asyncio.create_task(posted(rig, COMPLETIONS, BODY | {"return_token_ids": True}))
    await rig.begun()
    await rig.post("/start_weight_update", {})
    await rig.post("/update_weights", {"update_info": rig.tensors})
    await rig.open_group()  # a new session of the trainer
    rig.hurry()
    (told,) = (await asyncio.wait_for(running, 30))["choices"]
    assert told["weight_versions"] == [span(0, 0, LONG)]
    assert told["token_ids"] == expected(rig, LONG, [5, 6])
