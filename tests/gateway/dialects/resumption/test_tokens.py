"""A sample whose engine dies resumes from its tokens, or restarts from its prompt."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gateway.dialects.resumption import rest_sampling, whole_characters
from gateway.dialects.sample import joined_spans
from sim import server as sim_server
from sim.dialect import rendered
from tests.rigs.rig import Rig, StartRig

Json = dict[str, Any]

LONG = 80
EARLY = 20
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


async def started(start_rig: StartRig) -> Rig:
    return await start_rig(2, sim={"decode_step_s": 0.02})


async def cut_off(rig: Rig, path: str, body: Json) -> tuple[Json, int]:
    """The choice of a reply whose engine died after `EARLY` tokens, and the number of tokens that engines made."""
    before = sum(replica.generated_tokens for replica in rig.replicas)
    running = asyncio.create_task(rig.post(path, body))
    await rig.begun(tokens=EARLY)
    await rig.kill_loaded()
    rig.hurry()
    status, reply = await running
    assert status == 200, reply
    [told] = reply["choices"]
    return dict(told), sum(replica.generated_tokens for replica in rig.replicas) - before


@pytest.mark.parametrize("early", [EARLY, 0])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("streams", [False, True])
async def test_what_an_engine_aborts_as_it_ends_is_made_elsewhere(
    start_rig: StartRig, streams: bool, n: int, early: int
) -> None:
    """As vLLM's core does where it gets SIGTERM. Without tokens it sends no chunk."""
    rig = await started(start_rig)
    body = BODY | {"n": n, "temperature": 1, "return_token_ids": True}
    ask = rig.stream(COMPLETIONS, body) if streams else rig.post(COMPLETIONS, body)
    running = asyncio.create_task(ask)
    await rig.begun(n, tokens=early)
    for replica in rig.replicas:
        replica.scheduler.abort([*replica.scheduler.running])
    rig.hurry()
    reply: Any = await running
    choices = [one for chunk in (reply if streams else reply[1:]) for one in chunk["choices"]]
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["length"] * n
    assert sum(len(one["token_ids"] or ()) for one in choices) == n * LONG


def token_body(**sampling: Any) -> Json:
    asked = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True} | sampling
    return {"token_ids": [5, 6], "sampling_params": asked}


def chat_body(**fields: Any) -> Json:
    asked = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True} | fields
    return {"messages": [{"role": "user", "content": "hi"}], **asked}


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
    told, made = await cut_off(rig, path, body)
    assert (made, told["finish_reason"]) == (EARLY + LONG, "length")


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
    told, made = await cut_off(rig, CHAT, chat_body())
    assert (made, told["finish_reason"]) == (EARLY + LONG, "length")


async def test_a_stream_that_has_told_nothing_begins_again(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "ignore_eos": True}
    short = BODY | {"max_tokens": 2}
    running = [
        asyncio.create_task(rig.stream(CHAT, chat)),
        asyncio.create_task(rig.stream(COMPLETIONS, short | {"stop": ["never"]})),
        asyncio.create_task(rig.stream(COMPLETIONS, short)),
        asyncio.create_task(rig.stream(COMPLETIONS, short | {"n": 2, "temperature": 1.0})),
    ]
    await rig.begun(5, tokens=0)
    await rig.kill_loaded()
    rig.hurry()
    for chunks in await asyncio.gather(*running):
        ends = [one for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
        assert {one["finish_reason"] for one in ends} == {"length"}
        assert [one["weight_versions"] for one in ends] == [[span(0, 0, 2)]] * len(ends)
        openings = [one for chunk in chunks for one in chunk["choices"] if (one.get("delta") or {}).get("role")]
        assert len(openings) <= 1
