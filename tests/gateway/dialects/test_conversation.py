"""Streams of conversations under a parser of the engine's, cut off by an update (`in_flight: abort`)."""

import asyncio
from typing import Any

import pytest

from engines.errors import InvalidRequest
from sim import server as sim_server
from sim.dialect import ChatAnswer, DerenderChunkBody, derendered_chunk
from sim.model import detokenize
from sim.scheduler import Sample
from tests.rigs.rig import Rig, StartRig

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
LONG = 80
CALL_ID = "call-of-the-engine"


class PlayedParser:
    """Tells the text of a chunk with the next one, and that of the last at the end; and of a tool call at once.

    So what it tells depends on how the tokens were cut into chunks, as with parsers of vLLM's.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._held: dict[Sample, str] = {}  # by identity, kept alive
        self._chunk = ChatAnswer.chunk
        monkeypatch.setattr(ChatAnswer, "chunk", lambda answer, *sample: self._told_by(answer, *sample))
        monkeypatch.setattr(sim_server, "derendered_chunk", self._derendered)

    def _told_by(self, answer: ChatAnswer, sample: Sample, start: int, context: int) -> Json:
        chunk = self._chunk(answer, sample, start, context)
        (choice,) = chunk["choices"]
        before, said = self._held.get(sample, ""), choice["delta"]["content"]
        self._held[sample] = said
        choice["delta"] = {"content": before + said if choice["finish_reason"] else before}
        if start == 0:
            choice["delta"]["tool_calls"] = [{"index": 0, "id": CALL_ID, "type": "function", "function": {}}]
        return chunk

    def _derendered(self, body: DerenderChunkBody, model: str) -> Json:
        none: Json = {"output_token_ids": [], "output_chunk_lens": [], "last_tool_call_ids": [], "role_sent": False}
        state, told = body.stream_state or none, derendered_chunk(body.model_copy(update={"stream_state": None}), model)
        (asked,), (choice,) = body.generate_chunk.choices, told["chunk"]["choices"]
        ids, lengths = state["output_token_ids"], state["output_chunk_lens"]
        held = ids[len(ids) - lengths[-1] :] if lengths else []
        said = held + asked.token_ids if asked.finish_reason else held if asked.token_ids else []
        is_ended = asked.finish_reason is not None and state["last_tool_call_ids"]
        choice |= {"delta": {"content": detokenize(said) or None, "tool_calls": []}, "logprobs": None}
        choice["finish_reason"] = "tool_calls" if is_ended else asked.finish_reason
        if asked.token_ids:
            state = state | {
                "output_token_ids": ids + asked.token_ids,
                "output_chunk_lens": [*lengths, len(asked.token_ids)],
            }
        return told | {"stream_state": state}


def body(**fields: Any) -> Json:
    asked = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True, "stream": True} | fields
    return {"messages": [{"role": "user", "content": "hi"}], **asked}


async def started(start_rig: StartRig) -> Rig:
    rig = await start_rig(2, sim={"decode_step_s": 0.02}, weights={"in_flight": "abort"})
    await rig.open_group()
    return rig


async def cut_off(rig: Rig, asked: Json, samples: int = 1) -> list[Json]:
    running = asyncio.create_task(rig.stream(CHAT, asked))
    await rig.begun(samples)
    await rig.update()
    rig.hurry()
    return [choice for chunk in await running for choice in chunk["choices"]]


def text_of(told: list[Json]) -> str:
    return "".join(one["delta"].get("content") or "" for one in told)


@pytest.mark.parametrize("n", [1, 2])
async def test_what_a_parser_held_back_is_told_once_and_in_its_place(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    PlayedParser(monkeypatch)
    rig = await started(start_rig)
    all_told = await cut_off(rig, body(n=n, temperature=float(n > 1), return_token_ids=True), n)
    for index in range(n):
        told = [one for one in all_told if one["index"] == index]
        assert [one["finish_reason"] for one in told] == [None] * (len(told) - 1) + ["length"]
        ids = [token_id for one in told for token_id in one.get("token_ids") or ()]
        assert (len(ids), text_of(told)) == (LONG, detokenize(ids))
        calls = [call for one in told for call in one["delta"].get("tool_calls") or ()]
        assert [call["id"] for call in calls] == [CALL_ID]
        old, new = told[-1]["weight_versions"]
        assert (old["version"], old["start"], new["version"], new["end"]) == (0, 0, 1, LONG)
        assert 0 < old["end"] == new["start"] < LONG


async def test_a_client_that_asked_for_no_ids_hears_nothing_where_the_parser_tells_nothing(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    PlayedParser(monkeypatch)
    rig = await started(start_rig)
    told = await cut_off(rig, body())
    assert len(text_of(told)) == LONG
    assert all(one["delta"] or one["finish_reason"] for one in told)
    assert all(one.get("token_ids") is None for one in told)


async def test_a_conversation_that_stops_after_a_tool_call_says_so(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    PlayedParser(monkeypatch)
    rig = await started(start_rig)
    told = await cut_off(rig, body(stop_token_ids=list(range(3, 1000)), min_tokens=60))
    assert told[-1]["finish_reason"] == "tool_calls"


async def test_a_stream_whose_engine_does_not_tell_it_ends_with_what_it_was_cut_off_with(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    PlayedParser(monkeypatch)

    def refused(body: DerenderChunkBody, model: str) -> Json:
        raise InvalidRequest("no")

    monkeypatch.setattr(sim_server, "derendered_chunk", refused)
    rig = await started(start_rig)
    told = await cut_off(rig, body(return_token_ids=True))
    ids = [token_id for one in told for token_id in one.get("token_ids") or ()]
    assert (told[-1]["finish_reason"], told[-1]["delta"]) == ("abort", {})
    assert text_of(told) == detokenize(ids)
    ((version, end),) = [(span["version"], span["end"]) for span in told[-1]["weight_versions"]]
    assert (version, end) == (0, len(ids))
    assert 0 < end < LONG


async def test_log_probs_have_their_names_also_where_a_stream_under_a_parser_tells_none(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    PlayedParser(monkeypatch)
    rig = await started(start_rig)
    told = await cut_off(rig, body(logprobs=True, top_logprobs=2, return_token_ids=True))
    entries = [entry for one in told if one["logprobs"] for entry in one["logprobs"]["content"]]
    assert "".join(entry["token"] for entry in entries) == text_of(told)
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
