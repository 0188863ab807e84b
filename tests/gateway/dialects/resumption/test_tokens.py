"""A sample that an update with `in_flight: abort` cuts off resumes from its tokens, or restarts from its prompt."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from engines.errors import EngineUnreachable
from gateway.dialects.replies.assembly import Assembly
from gateway.dialects.replies.carried import opened
from gateway.dialects.resumption.tokens import joined, joined_spans, rest_body, rest_sampling, whole_characters
from sim import server as sim_server
from sim.dialect import DerenderBody, chat_text, derendered, rendered
from sim.model import SimModel, detokenize, read, weights_key
from sim.model import tokenize as chat_ids
from tests.rigs.rig import MAX_MODEL_LEN, Rig, StartRig

Json = dict[str, Any]

LONG = 80
BODY: Json = {"model": "sim", "prompt": [5, 6], "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"


def span(version: int, start: int | None, end: int | None) -> Json:
    return {"version": version, "start": start, "end": end}


def test_the_rest_may_have_what_the_whole_has_left() -> None:
    body = {"prompt": "hello", "n": 4, "max_tokens": 10, "min_tokens": 6, "request_id": "a", "top_p": 0.9}
    assert rest_body(body, [1, 2, 3, 4], 2) == {
        "prompt": [1, 2, 3, 4], "n": 1, "max_tokens": 8, "min_tokens": 4, "top_p": 0.9,
    }  # fmt: skip
    later = rest_body(body, [1] * 12, 8)
    assert (later["max_tokens"], "min_tokens" in later) == (2, False)


@pytest.mark.parametrize("made", [[], [11], [11, 12]])
def test_samples_that_agree_so_far_continue_with_different_seeds(made: list[int]) -> None:
    seeds = [rest_sampling({"seed": 7, "n": 4}, made, index)["seed"] for index in range(4)]
    assert len(set(seeds)) == 4
    assert made or seeds == [7, 8, 9, 10], "as vLLM draws the samples of a group"


def test_spans_of_one_version_that_meet_are_one() -> None:
    assert joined_spans([span(1, 0, 4)], [span(1, 0, 3)], 4) == [span(1, 0, 7)]
    assert joined_spans([span(1, 0, 4)], [span(2, 0, 3)], 4) == [span(1, 0, 4), span(2, 4, 7)]
    assert joined_spans([span(1, 0, 2), span(2, 2, 5)], [span(2, 0, 3)], 3) == [span(1, 0, 2), span(2, 2, 6)]
    assert joined_spans([span(1, 0, 0)], [span(2, 0, 3)], 0) == [span(2, 0, 3)]


def test_spans_without_limits_stay_so() -> None:
    first = [span(1, None, None), span(2, None, None)]
    assert joined_spans(first, [span(2, 0, 3)], 4) == [*first, span(2, 4, 7)]
    assert joined_spans([span(1, 0, 4)], first, 4) == [span(1, 0, 4), *first]
    assert joined_spans(first, [span(2, None, None), span(3, None, None)], 4) == [*first, span(3, None, None)]
    assert joined_spans(first, [span(2, 0, 3)], 0) == [span(2, 0, 3)], "no token of the first is kept"


def choice(text: str, token_ids: list[int], prompt: list[int], version: int) -> Json:
    tokens = list(text)
    offsets = list(range(len(tokens)))
    logprobs = {"text_offset": offsets, "tokens": tokens, "token_logprobs": [-1.0 * one for one in token_ids]}
    return {
        "index": 3, "text": text, "token_ids": token_ids, "prompt_token_ids": prompt, "finish_reason": "stop",
        "logprobs": logprobs | {"top_logprobs": [{one: -1.0} for one in tokens]},
        "weight_versions": [span(version, 0, len(token_ids))], "kv_versions": [version],
    }  # fmt: skip


def test_two_parts_are_one_completion() -> None:
    both = joined(choice("abc", [1, 2, 3], [8, 9], 0), choice("de", [4, 5], [8, 9, 1, 2, 3], 1) | {"index": 0})
    assert (both["index"], both["text"], both["token_ids"], both["prompt_token_ids"]) == (
        3,
        "abcde",
        [1, 2, 3, 4, 5],
        [8, 9],
    )
    assert both["logprobs"]["tokens"] == list("abcde")
    assert both["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert both["logprobs"]["token_logprobs"] == [-1, -2, -3, -4, -5]
    assert (both["weight_versions"], both["kv_versions"]) == ([span(0, 0, 3), span(1, 3, 5)], [1])


def test_tokens_that_were_left_out_of_the_rests_prompt_are_left_out_of_the_whole() -> None:
    first = choice("ab", [1, 2, 3], [9], 0)
    first["logprobs"] = None
    both = joined(first, choice("éc", [6, 7], [9, 1, 2], 1) | {"logprobs": None})
    assert (both["text"], both["token_ids"]) == ("abéc", [1, 2, 6, 7])
    assert both["weight_versions"] == [span(0, 0, 2), span(1, 2, 4)]


async def test_a_rest_that_was_aborted_before_its_first_token_leaves_all_of_the_first_part() -> None:
    first = choice("abc", [1, 2, 3], [8, 9], 0)
    [rest] = opened(await Assembly(1, "engine-0").joined(asyncio.Lock()))["choices"]
    both = joined(first, rest | {"weight_versions": [span(1, 0, 0)], "kv_versions": [0]})
    assert both == first | {"finish_reason": "abort", "stop_reason": None, "prompt_logprobs": None}


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


async def streamed(rig: Rig, path: str, body: Json) -> list[Json]:
    async with rig.client.post(rig.url + path, json=body | {"stream": True}) as response:
        events = [event.removeprefix("data: ") for event in (await response.text()).split("\n\n") if event]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


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


def scored(rig: Rig, boundary: int, prompt: list[int], token_ids: list[int]) -> list[float]:
    """The log-prob of each token by the weights that made it."""
    model, context, told = SimModel.of(rig.sim), read(prompt), []
    for place, token_id in enumerate(token_ids):
        told.append(model.logprob(context, token_id, weights_key("default" if place < boundary else "1")))
        context = read([token_id], context)
    return told


async def test_a_completion_goes_on_from_its_tokens_on_the_new_weights(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    running = asyncio.create_task(posted(rig, COMPLETIONS, BODY | {"logprobs": 1, "return_token_ids": True}))
    await rig.begun()
    await rig.update()
    rig.hurry()
    reply = await running
    (told,) = reply["choices"]
    assert told["token_ids"] == expected(rig, seam(told), [5, 6])
    assert told["text"] == detokenize(told["token_ids"])
    assert (told["finish_reason"], told["prompt_token_ids"], told["kv_versions"]) == ("length", [5, 6], [1])
    logprobs = told["logprobs"]
    assert "".join(logprobs["tokens"]) == told["text"]
    assert [told["text"][offset] for offset in logprobs["text_offset"]] == logprobs["tokens"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == LONG
    assert logprobs["token_logprobs"] == scored(rig, seam(told), [5, 6], told["token_ids"])
    assert reply["usage"] == {"prompt_tokens": 2, "completion_tokens": LONG, "total_tokens": LONG + 2}
    (record,) = (await rig.get("/v1/weight_updates"))[1]["weight_updates"]
    assert (record["in_flight"], record["end"]) == ("abort", "committed")
    assert sum(replica.load_samples for replica in rig.fleet.replicas) == 0


class BreakingEngine:
    """An engine whose connection breaks once an update has ended a sample in a stream."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def events(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[list[bytes]]:
        async with aclosing(self._engine.events(path, body, timeout_s)) as blocks:
            async for events in blocks:
                yield events
                if any(b'"finish_reason":"abort"' in event for event in events):
                    raise EngineUnreachable(path, replica_id=self._engine.replica_id)


async def test_a_sample_goes_on_where_the_connection_breaks_after_the_update_has_ended_it(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    for replica in rig.fleet.replicas:
        replica.engine = BreakingEngine(replica.engine)  # type: ignore[assignment]  # all but its streams is the engine's
    running = asyncio.create_task(posted(rig, COMPLETIONS, BODY | {"return_token_ids": True}))
    await rig.begun()
    await rig.update()
    rig.hurry()
    (told,) = (await running)["choices"]
    assert told["token_ids"] == expected(rig, seam(told), [5, 6])
    assert told["finish_reason"] == "length"


async def test_ids_that_nobody_asked_for_are_not_told(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    running = asyncio.create_task(posted(rig, COMPLETIONS, BODY))
    await rig.begun()
    await rig.update()
    rig.hurry()
    (told,) = (await running)["choices"]
    assert (told["token_ids"], told["prompt_token_ids"]) == (None, None)
    assert told["text"] == detokenize(expected(rig, seam(told), [5, 6]))


async def test_samples_of_a_group_go_on_each_from_its_own_tokens(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    body = BODY | {"prompt": [[5], [6]], "n": 3, "temperature": 1.0, "return_token_ids": True, "logprobs": 0}
    running = asyncio.create_task(posted(rig, COMPLETIONS, body))
    await rig.begun(6)
    await rig.update()
    rig.hurry()
    reply = await running
    assert [told["index"] for told in reply["choices"]] == list(range(6))
    assert [told["prompt_token_ids"] for told in reply["choices"]] == [[5]] * 3 + [[6]] * 3
    for told in reply["choices"]:
        seam(told)
        assert len(told["token_ids"]) == len(told["logprobs"]["tokens"]) == LONG
    assert len({tuple(told["token_ids"]) for told in reply["choices"]}) == 6
    assert reply["usage"] == {"prompt_tokens": 2, "completion_tokens": 6 * LONG, "total_tokens": 6 * LONG + 2}


@pytest.mark.parametrize("wants_ids", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_goes_on_where_it_was(start_rig: StartRig, n: int, wants_ids: bool) -> None:
    rig = await started(start_rig)
    sampling = {"temperature": 1.0 if n > 1 else 0, "n": n, "stream_options": {"include_usage": True}}
    asked = BODY | sampling | {"return_token_ids": wants_ids}
    running = asyncio.create_task(streamed(rig, COMPLETIONS, asked))
    await rig.begun(n)
    await rig.update()
    rig.hurry()
    *chunks, last = await running
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": n * LONG, "total_tokens": n * LONG + 2}
    for index in range(n):
        told = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert [one["finish_reason"] for one in told] == [None] * (len(told) - 1) + ["length"]
        boundary = seam(told[-1])
        assert told[-1]["kv_versions"] == [1]
        text = "".join(one["text"] for one in told)
        assert len(text) == LONG
        if n == 1:
            assert text == detokenize(expected(rig, boundary, [5, 6]))
        ids = [token_id for one in told for token_id in one.get("token_ids") or ()]
        assert detokenize(ids) == (text if wants_ids else "")
        assert [one["prompt_token_ids"] for one in told if one["prompt_token_ids"]] == ([[5, 6]] if wants_ids else [])


async def test_sglangs_dialect_has_it_too(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    sampling = {"max_new_tokens": LONG, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [5, 6], "sampling_params": sampling, "return_logprob": True}

    async def stream() -> Json:
        return (await streamed(rig, "/generate", body))[-1]

    running = [asyncio.create_task(posted(rig, "/generate", body)), asyncio.create_task(stream())]
    await rig.begun(2)
    await rig.update()
    rig.hurry()
    for told in await asyncio.gather(*running):
        meta = told["meta_info"]
        assert told["output_ids"] == expected(rig, seam(meta), [5, 6])
        assert [entry[1] for entry in meta["output_token_logprobs"]] == told["output_ids"]
        assert meta["finish_reason"]["type"] == "length"


async def test_a_completion_may_be_cut_off_more_than_once(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    running = asyncio.create_task(posted(rig, COMPLETIONS, BODY | {"return_token_ids": True, "min_tokens": 70}))
    stream = asyncio.create_task(streamed(rig, COMPLETIONS, BODY))
    for _ in range(2):
        await rig.begun(2)
        await rig.update()
    rig.hurry()
    (told,) = (await running)["choices"]
    last = (await stream)[-1]["choices"][0]
    for one in (told, last):
        assert [int(span["version"]) for span in one["weight_versions"]] == [0, 1, 2]
        ends = [span["end"] for span in one["weight_versions"]]
        assert [span["start"] for span in one["weight_versions"]] == [0, *ends[:-1]]
        assert ends[-1] == LONG
    versions = [
        {0: "default"}.get(span["version"], str(span["version"]))
        for span in told["weight_versions"]
        for _ in range(span["start"], span["end"])
    ]
    model = SimModel.of(rig.sim)
    assert told["token_ids"] == model.complete([5, 6], versions=versions, max_tokens=LONG, ignore_eos=True)


async def test_the_tokens_of_what_goes_on_outlive_the_replica_that_goes_on_with_them(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    running = asyncio.create_task(posted(rig, COMPLETIONS, BODY | {"return_token_ids": True}))
    await rig.begun()
    await rig.update()
    (busy,) = (replica.replica_id for replica in rig.fleet.replicas if replica.load_samples)
    await next(replica for replica in rig.replicas if replica.info.replica_id == busy).kill()
    rig.hurry()
    (told,) = (await asyncio.wait_for(running, 20))["choices"]
    assert told["token_ids"] == expected(rig, seam(told), [5, 6])


async def test_a_seeded_group_continues_on_the_new_weights_and_is_marked(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    body = BODY | {"temperature": 1.0, "seed": 4, "n": 2, "return_token_ids": True}
    running = asyncio.create_task(posted(rig, COMPLETIONS, body))
    await rig.begun(2)
    await rig.update()
    rig.hurry()
    reply = await running
    for told in reply["choices"]:
        seam(told)
        assert (told["resumed"], len(told["token_ids"])) == (["seed"], LONG)
    assert len({tuple(told["token_ids"]) for told in reply["choices"]}) == 2


def token_body(**sampling: Any) -> Json:
    asked = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True} | sampling
    return {"token_ids": [5, 6], "sampling_params": asked}


async def test_token_ids_go_on_from_token_ids(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    running = asyncio.create_task(posted(rig, TOKENS, token_body(logprobs=1) | {"request_id": "mine"}))
    await rig.begun()
    await rig.update()
    rig.hurry()
    reply = await running
    (told,) = reply["choices"]
    assert told["token_ids"] == expected(rig, seam(told), [5, 6])
    assert (reply["request_id"], told["finish_reason"], told["kv_versions"]) == ("mine", "length", [1])
    entries = told["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == told["token_ids"]
    assert [entry["logprob"] for entry in entries] == scored(rig, seam(told), [5, 6], told["token_ids"])
    assert (reply["usage"]["completion_tokens"], reply["usage"]["total_tokens"]) == (LONG, LONG + 2)


async def test_token_ids_without_a_limit_fill_the_context_all_the_same(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    running = asyncio.create_task(posted(rig, TOKENS, token_body(max_tokens=None)))
    await rig.begun()
    await rig.update()
    rig.hurry()
    (told,) = (await running)["choices"]
    seam(told, MAX_MODEL_LEN - 2)
    assert len(told["token_ids"]) == MAX_MODEL_LEN - 2


async def test_samples_of_token_ids_go_on_each_for_itself(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    running = asyncio.create_task(posted(rig, TOKENS, token_body(n=3, temperature=1.0)))
    await rig.begun(3)
    await rig.update()
    rig.hurry()
    reply = await running
    assert [told["index"] for told in reply["choices"]] == [0, 1, 2]
    for told in reply["choices"]:
        seam(told)
    assert len({tuple(told["token_ids"]) for told in reply["choices"]}) == 3
    assert reply["usage"]["completion_tokens"] == 3 * LONG


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_of_token_ids_goes_on_where_it_was(start_rig: StartRig, n: int) -> None:
    rig = await started(start_rig)
    body = token_body(n=n, temperature=1.0 if n > 1 else 0, logprobs=0)
    asked = body | {"stream_options": {"include_usage": True}, "request_id": "mine"}
    running = asyncio.create_task(streamed(rig, TOKENS, asked))
    for _ in range(2):
        await rig.begun(n)
        await rig.update()
    rig.hurry()
    *chunks, last = await running
    assert (last["choices"], last["usage"]["completion_tokens"], last["usage"]["prompt_tokens"]) == ([], n * LONG, 2)
    assert {chunk["request_id"] for chunk in chunks} == {"mine"}
    for index in range(n):
        told = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert [one["finish_reason"] for one in told] == [None] * (len(told) - 1) + ["length"]
        ids = [token_id for one in told for token_id in one["token_ids"]]
        assert [entry["token_id"] for one in told for entry in one["logprobs"]["content"]] == ids
        assert len(ids) == LONG
        spans = told[-1]["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "1", "2"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        if n == 1:
            names = {"0": "default"}  # the checkpoint's, in the simulated engine
            versions = [
                names.get(span["version"], span["version"]) for span in spans for _ in range(span["start"], span["end"])
            ]
            assert ids == SimModel.of(rig.sim).complete([5, 6], versions=versions, max_tokens=LONG, ignore_eos=True)


def chat_body(**fields: Any) -> Json:
    asked = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True} | fields
    return {"messages": [{"role": "user", "content": "hi"}], **asked}


CHAT_PROMPT = chat_ids(chat_text(chat_body()["messages"]))


async def test_a_conversation_goes_on_from_its_tokens(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    asked = chat_body(logprobs=True, top_logprobs=2, return_token_ids=True, max_tokens=60)
    running = asyncio.create_task(posted(rig, CHAT, asked))
    await rig.begun()
    await rig.update()
    rig.hurry()
    reply = await running
    (told,) = reply["choices"]
    boundary = seam(told, 60)
    assert reply["prompt_token_ids"] == CHAT_PROMPT
    assert told["token_ids"] == expected(rig, boundary, CHAT_PROMPT, 60)
    assert told["message"] == {"role": "assistant", "content": detokenize(told["token_ids"])}
    assert (told["finish_reason"], told["stop_reason"], told["kv_versions"]) == ("length", None, [1])
    entries = told["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == told["message"]["content"]
    assert [entry["logprob"] for entry in entries] == scored(rig, boundary, CHAT_PROMPT, told["token_ids"])
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (len(CHAT_PROMPT), 60)
    quiet = await posted(rig, CHAT, asked)
    assert told.keys() == quiet["choices"][0].keys()
    assert reply.keys() == quiet.keys()


async def test_samples_of_a_conversation_resume_separately_however_often_they_are_cut_off(
    start_rig: StartRig,
) -> None:
    rig = await started(start_rig)
    running = asyncio.create_task(posted(rig, CHAT, chat_body(n=3, temperature=1.0)))
    for _ in range(2):
        await rig.begun(3)
        await rig.update()
    rig.hurry()
    reply = await running
    assert [told["index"] for told in reply["choices"]] == [0, 1, 2]
    assert reply["prompt_token_ids"] is None
    for told in reply["choices"]:
        assert [int(one["version"]) for one in told["weight_versions"]] == [0, 1, 2]
        assert (told["weight_versions"][-1]["end"], told["token_ids"]) == (LONG, None)
        assert len(told["message"]["content"]) == LONG
    assert len({told["message"]["content"] for told in reply["choices"]}) == 3
    assert reply["usage"]["completion_tokens"] == 3 * LONG


async def test_a_conversations_default_limit_holds_for_the_whole_of_it(start_rig: StartRig) -> None:
    """vLLM's rendered parameters leave out `max_tokens` where it is 16."""
    rig = await start_rig(2, sim={"decode_step_s": 0.05}, weights={"in_flight": "abort"})
    await rig.open_group()
    running = asyncio.create_task(posted(rig, CHAT, chat_body(max_tokens=16)))
    await rig.begun()
    await rig.update()
    rig.hurry()
    (told,) = (await running)["choices"]
    seam(told, 16)


async def test_tool_calls_are_those_that_the_engine_finds_in_all_of_the_tokens(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    seen: list[DerenderBody] = []

    def parsed(body: DerenderBody, model: str) -> Json:
        seen.append(body)
        (choice,) = derendered(body, model)["choices"]
        return {"choices": [choice | {"message": {"role": "assistant", "content": None, "tool_calls": calls}}]}

    monkeypatch.setattr(sim_server, "derendered", parsed)
    rig = await started(start_rig)
    stops = chat_body(return_token_ids=True, stop_token_ids=list(range(3, 1000)), min_tokens=60)
    running = asyncio.create_task(posted(rig, CHAT, stops))
    await rig.begun()
    await rig.update()
    rig.hurry()
    (told,) = (await running)["choices"]
    assert (told["finish_reason"], told["message"]["tool_calls"]) == ("tool_calls", calls)
    assert len(told["token_ids"]) == 60
    (choice,) = seen[0].generate_response.choices
    assert choice.token_ids == told["token_ids"][:-1], "the token that ended it is not told"
    assert choice.finish_reason == "stop"
    assert seen[0].prompt_token_ids == CHAT_PROMPT


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
    running = asyncio.create_task(posted(rig, path, body))
    await rig.begun()
    await rig.update()
    rig.hurry()
    (told,) = (await running)["choices"]
    [made] = told["weight_versions"]
    assert (int(made["version"]), made["start"], made["end"], told["finish_reason"]) == (1, 0, LONG, "length")


async def test_a_conversation_whose_prompt_reads_otherwise_now_is_made_again(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim_server, "rendered", lambda body, limit: rendered(body, limit) | {"token_ids": [5, 6]})
    rig = await started(start_rig)
    running = asyncio.create_task(posted(rig, CHAT, chat_body()))
    await rig.begun()
    await rig.update()
    rig.hurry()
    (told,) = (await running)["choices"]
    assert told["weight_versions"] == [span(1, 0, LONG)]


async def test_where_no_engine_takes_conversations_apart_they_are_made_again(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    for replica in rig.fleet.replicas:
        replica.info = replace(replica.info, capabilities=frozenset())
    running = asyncio.create_task(posted(rig, CHAT, chat_body()))
    await rig.begun()
    await rig.update()
    rig.hurry()
    (told,) = (await running)["choices"]
    assert told["weight_versions"] == [span(1, 0, LONG)]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_streamed_conversation_goes_on_where_it_was(start_rig: StartRig, n: int) -> None:
    rig = await started(start_rig)
    wants = {"return_token_ids": n == 1, "logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}}
    asked = chat_body(n=n, temperature=1.0 if n > 1 else 0, max_tokens=60) | wants
    running = asyncio.create_task(streamed(rig, CHAT, asked))
    await rig.begun(n)
    await rig.update()
    rig.hurry()
    *chunks, last = await running
    usage = {"prompt_tokens": len(CHAT_PROMPT), "completion_tokens": n * 60, "total_tokens": len(CHAT_PROMPT) + n * 60}
    assert (last["choices"], last["usage"]) == ([], usage)
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    assert [chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")] == [CHAT_PROMPT] * (n == 1)
    for index in range(n):
        told = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert [one["finish_reason"] for one in told] == [None] * (len(told) - 1) + ["length"]
        assert [one["delta"]["role"] for one in told if "role" in one["delta"]] == ["assistant"]
        text = "".join(one["delta"].get("content") or "" for one in told)
        entries = [entry for one in told if one["logprobs"] for entry in one["logprobs"]["content"]]
        assert "".join(entry["token"] for entry in entries) == text
        assert {len(entry["top_logprobs"]) for entry in entries} == {1}
        boundary = seam(told[-1], 60)
        assert told[-1]["kv_versions"] == [1]
        ids = [token_id for one in told for token_id in one.get("token_ids") or ()]
        assert len(text) == 60
        if n == 1:
            assert ids == expected(rig, boundary, CHAT_PROMPT, 60)
            assert text == detokenize(ids)
        else:
            assert ids == []


async def test_a_stream_that_cannot_go_on_ends_with_what_it_has_told(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    running = [
        asyncio.create_task(streamed(rig, CHAT, chat_body(stop=["never"]))),
        asyncio.create_task(streamed(rig, COMPLETIONS, BODY | {"stop": ["never"]})),
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
        asyncio.create_task(streamed(rig, CHAT, chat)),
        asyncio.create_task(streamed(rig, COMPLETIONS, short | {"stop": ["never"]})),
        asyncio.create_task(streamed(rig, COMPLETIONS, short)),
        asyncio.create_task(streamed(rig, COMPLETIONS, short | {"n": 2, "temperature": 1.0})),
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


async def test_a_trainers_own_abort_is_delivered_as_it_is(start_rig: StartRig) -> None:
    rig = await started(start_rig)
    running = asyncio.create_task(posted(rig, COMPLETIONS, BODY | {"return_token_ids": True}))
    await rig.begun()
    await rig.post("/pause?mode=abort")
    (told,) = (await asyncio.wait_for(running, 30))["choices"]
    assert told["finish_reason"] == "abort"
    assert 0 < len(told["token_ids"]) < LONG
    await rig.post("/resume")
