"""A reply put together from an engine's chunks is the reply that the engine would have sent as a whole."""

import asyncio
from collections.abc import AsyncGenerator

import orjson
import pytest

from engines.clients.vllm_engine import VllmEngine
from engines.errors import EngineFailed
from gateway.dialects.completion_prompt import PATH
from gateway.dialects.replies.assembly import Assembly, is_read_in_chunks
from gateway.dialects.replies.carried import opened
from gateway.fleet.placement.routing import Rollout
from tests.rigs.rig import Json, Rig

BODY: Json = {"model": "sim", "prompt": [5, 6, 7], "max_tokens": 21, "return_token_ids": True}


async def assemble(chunks: AsyncGenerator[Json], n: int, replica_id: str) -> Json:
    assembly = Assembly(n, replica_id)
    async for one in chunks:
        assembly.add([orjson.dumps(one)])
    reply: Json = opened(assembly.reply())
    return reply


async def told(*chunks: Json) -> AsyncGenerator[Json]:
    for chunk in chunks:
        yield chunk


def chunk(index: int, text: str, **more: object) -> Json:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **more}
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice]}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "asked",
    [{}, {"logprobs": 2}, {"logprobs": 0, "return_tokens_as_token_ids": True}, {"ignore_eos": True}, {"max_tokens": 1}],
)
async def test_chunks_make_the_whole_reply(rig: Rig, asked: Json, n: int) -> None:
    engine = VllmEngine("a", rig.replicas[0].info.url)
    body = BODY | asked | {"n": n, "seed": 7, "temperature": 1.0 if n > 1 else 0}
    whole = await engine.generate(PATH, body, 5)
    streamed = engine.stream(PATH, body | {"stream_options": {"include_usage": True}}, 5)
    together = await assemble(streamed, n, "a")
    await engine.close()
    assert together["choices"] == whole["choices"]
    assert together["usage"] == {key: count for key, count in whole["usage"].items() if count is not None}
    assert together["object"] == whole["object"]


@pytest.mark.parametrize("begin", [0, 2, 22, -1])
async def test_offsets_are_those_of_names_wherever_a_chunk_counts_from(begin: int) -> None:
    def scored(*offsets: int) -> Json:
        names = ["token_id:10"] * len(offsets)
        return {"text_offset": list(offsets), "token_logprobs": [-1.0] * len(names), "tokens": names}

    first, second = scored(0, 11), scored(begin, begin + 11)
    chunks = told(chunk(0, "ab", logprobs=first), chunk(0, "cd", logprobs=second, finish_reason="length"))
    assert (await assemble(chunks, 1, "a"))["choices"][0]["logprobs"]["text_offset"] == [0, 11, 22, 33]


async def test_a_sample_aborted_before_its_first_token_is_an_empty_one() -> None:
    choices = (await assemble(told(chunk(0, "a", finish_reason="abort")), 2, "a"))["choices"]
    assert (choices[1]["finish_reason"], choices[1]["text"], choices[1]["token_ids"]) == ("abort", "", [])


@pytest.mark.parametrize("length", [2, 1 << 19])
async def test_a_sample_that_was_never_begun_goes_on_beside_one_without_an_end(length: int) -> None:
    assembly = Assembly(2, "a")
    assembly.add([orjson.dumps(chunk(0, "a" * length, token_ids=[1, 2]))])
    with pytest.raises(EngineFailed):
        await assembly.joined(asyncio.Lock())
    part = assembly.part()
    assert part is not None
    assert [choice["finish_reason"] for choice in part["choices"]] == [None, None]


async def test_a_sample_without_an_end_is_a_failure_of_the_engine() -> None:
    with pytest.raises(EngineFailed, match=r"replica a: .* sample 0 did, after 2 tokens"):
        await assemble(told(chunk(0, "ab", token_ids=[1, 2])), 1, "a")


@pytest.mark.parametrize("odd", [{"token_ids": "no list"}, {"text": 5}, {"logprobs": {"token_logprobs": 0.5}}])
async def test_tokens_before_a_chunk_of_another_form_are_kept(odd: Json) -> None:
    assembly = Assembly(1, "a")
    assembly.add([orjson.dumps(chunk(0, "b", token_ids=[5]))])
    with pytest.raises(EngineFailed):
        assembly.add([orjson.dumps({"choices": [{"index": 0, "token_ids": [6]} | odd]})])
    part = assembly.part()
    assert part is not None
    assert part["choices"][0]["token_ids"] == [5]


def rollout(n: int, *, goes_on: bool = False) -> Rollout:
    return Rollout(request_id="a", model="sim", n=n, tokens=1, goes_on=goes_on)


@pytest.mark.parametrize(("field", "value"), [("prompt_logprobs", 0), ("echo", True), ("use_beam_search", True)])
async def test_what_cannot_be_streamed_is_read_whole(rig: Rig, field: str, value: object) -> None:
    info = rig.replicas[0].info
    assert is_read_in_chunks({"prompt": [5], field: None}, 16, rollout(2), info)
    assert not is_read_in_chunks({"prompt": [5], field: value}, 16, rollout(2), info)


async def test_a_short_sample_alone_is_read_whole_and_a_long_one_in_chunks(rig: Rig) -> None:
    info = rig.replicas[0].info
    assert not is_read_in_chunks({"prompt": [5]}, 64, rollout(1), info)
    assert is_read_in_chunks({"prompt": [5]}, 65, rollout(1), info)
    assert is_read_in_chunks({"prompt": [5]}, 9, rollout(1, goes_on=True), info)  # where engines die in a row


async def test_a_part_has_the_spans_that_its_engine_reported_with_the_first_token_of_each_version() -> None:
    assembly = Assembly(2, "a")
    spans = [{"version": "0", "start": 0, "end": 3}, {"version": "1", "start": 3, "end": 4}]
    chunks = [
        chunk(0, "a", token_ids=[1], weight_versions=[{"version": "0", "start": 0, "end": 1}]),
        chunk(0, "bcd", token_ids=[2, 3, 4], weight_versions=spans),
        chunk(0, "ef", token_ids=[5, 6]),
    ]
    assembly.add([orjson.dumps(one) for one in chunks])
    part = assembly.part()
    assert part is not None
    assert part["choices"][0]["weight_versions"] == [spans[0], {"version": "1", "start": 3, "end": 6}]


async def test_prompt_logprobs_reach_the_client(rig: Rig) -> None:
    choice = (await rig.complete([[5, 6, 7]], n=2, prompt_logprobs=0))["choices"][0]
    assert len(choice["prompt_logprobs"]) == 3
