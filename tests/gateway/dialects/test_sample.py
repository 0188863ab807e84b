"""Samples are what their engines told, however it was cut into chunks and written as JSON, and in however many parts.

The joining of chunks is compared with one that decodes each: plain, and too slow for a gateway.
"""

import json
import random
from itertools import accumulate
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.chunks import Chunk
from engines.engine import Json
from engines.raw_json import NO_JSON, encoded, opened
from gateway.dialects.completions import CompletionPrompt
from gateway.dialects.sample import CUT_OFF, Reply, Sample, Source
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Flight, Replica
from tests.rigs.rig import Rig

ODD_TEXTS = st.sampled_from(
    ["", "a", "word ", '"', "\\", '","', '"],["', "][", '\\"][', "}][{", "\u2028", "\0", "\N{GRINNING FACE}", "é" * 20]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
NUMBERS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(-30, 0) | st.none()


@st.composite
def sample_chunks(draw: st.DrawFn, index: int) -> list[Json]:
    """The choices of one sample, as an engine may cut them into chunks."""
    count = draw(st.integers(1, 4))
    has_logprobs, has_ids = draw(st.booleans()), draw(st.booleans())
    choices: list[Json] = []
    for place in range(count):
        names = draw(st.lists(ODD_TEXTS, max_size=5))
        has_own_text: bool = draw(st.booleans())
        choice: Json = {"index": index, "text": draw(ODD_TEXTS) if has_own_text else "".join(names)}
        if has_ids:
            choice["token_ids"] = None if not names else [draw(NUMBERS) for _ in names]
        if has_logprobs:
            values = [draw(LOGPROBS) for _ in names]
            tops = [draw(st.none() | st.dictionaries(ODD_TEXTS, LOGPROBS, max_size=2)) for _ in names]
            *offsets, _ = accumulate(map(len, names), initial=draw(st.integers(0, 9)))
            found = {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
            choice["logprobs"] = found if bool(names) or draw(st.booleans()) else None
        if place == 0 and draw(st.booleans()):
            choice["prompt_token_ids"] = draw(st.none() | st.lists(NUMBERS, min_size=1, max_size=12))
        is_last = place == count - 1
        choice["finish_reason"] = draw(st.sampled_from(["stop", "length"])) if is_last else None
        if is_last and draw(st.booleans()):
            choice["weight_versions"] = [{"version": draw(st.sampled_from(["3", "default"])), "start": 0, "end": 9}]
        if draw(st.booleans()):
            choice["unknown"] = {"nested": [None, 1.5, draw(ODD_TEXTS)]}
        choices.append(choice)
    return choices


@st.composite
def streams(draw: st.DrawFn) -> tuple[int, list[Json]]:
    """The number of samples, and the chunks of all in an order that keeps each sample's."""
    n = draw(st.integers(1, 3))
    waiting = [draw(sample_chunks(index)) for index in range(n)]
    chunks = []
    while any(waiting):
        left = [index for index in range(n) if waiting[index]]
        choices = [waiting[index].pop(0) for index in left if index == left[0] or draw(st.booleans())]
        if choices:
            chunks.append({"id": "cmpl-1", "created": 5, "choices": choices, "more": draw(ODD_TEXTS)})
    if draw(st.booleans()):
        chunks.append({"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2**31}})
    return n, chunks


def written(value: Any, ways: random.Random) -> str:
    """JSON as engines may write it: any order of keys, white space, escapes, a key twice of which the last counts."""
    space = ways.choice(["", "", " ", "\n", "\t "])
    if isinstance(value, dict):
        items = list(value.items())
        ways.shuffle(items)
        members = [f"{written(key, ways)}{space}:{space}{written(item, ways)}" for key, item in items]
        if items and items[0][0] in ("text", "more", "unknown") and ways.random() < 0.3:
            members.insert(0, f"{written(items[0][0], ways)}:null")
        return "{" + space + f"{space},{space}".join(members) + space + "}"
    if isinstance(value, list):
        return "[" + space + f"{space},{space}".join(written(item, ways) for item in value) + space + "]"
    if isinstance(value, str) and ways.random() < 0.2:
        return '"' + "".join(f"\\u{unit:04x}" for unit in _units(value)) + '"'
    return json.dumps(value, ensure_ascii=ways.random() < 0.5)


def _units(text: str) -> list[int]:
    data = text.encode("utf-16-be")
    return [int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2)]


def decoded_and_joined(n: int, chunks: list[Json]) -> Json:
    """The reply of chunks, each decoded."""
    reply = {key: value for key, value in chunks[0].items() if key not in ("choices", "usage")}
    for chunk in chunks:
        if chunk.get("usage") is not None:
            reply["usage"] = chunk["usage"]
    reply["choices"] = []
    for index in range(n):
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        logprobs: Json = {}
        for part in parts:
            for key, entries in (part.get("logprobs") or {}).items():
                logprobs.setdefault(key, []).extend(entries)
        if "text_offset" in logprobs:
            lengths = accumulate(map(len, logprobs["tokens"][:-1]), initial=0)
            logprobs["text_offset"] = list(lengths)[: len(logprobs["tokens"])]
        joined = {
            "text": "".join(part["text"] for part in parts),
            "token_ids": [token_id for part in parts for token_id in part.get("token_ids") or ()]
            if any(part.get("token_ids") is not None for part in parts)
            else parts[-1].get("token_ids", []),
            "logprobs": logprobs or None,
            "prompt_token_ids": next(filter(None, (part.get("prompt_token_ids") for part in reversed(parts))), None),
        }
        reply["choices"].append({"stop_reason": None, "prompt_logprobs": None, **parts[-1], **joined})
    return reply


BARE: Json = {"text": "", "logprobs": None, "prompt_logprobs": None, "token_ids": [], "prompt_token_ids": None}


def begun(index: int = 0, version: int = 1) -> Sample:
    """A sample that a replica makes under a version."""
    sample = Sample(index)
    sample.begin(of_version(version))
    return sample


def of_version(version: int) -> Source:
    return Source(cast(Replica, None), Flight(version), None)


def made(reply: Reply, *events: bytes) -> list[Json]:
    """The choices of a reply, whose samples ended as their engine told, under version 1."""
    if events:
        reply.take(Chunk.joined(list(map(Chunk.read, events)), {}), reply.samples)
    for sample in reply.samples:
        sample.stamp()
    return [sample.told(BARE) for sample in reply.samples]


def without_stamps(choices: list[Json]) -> list[Json]:
    stamps = ("weight_versions", "kv_versions", "missing_logprobs")
    return [{key: value for key, value in choice.items() if key not in stamps} for choice in choices]


@settings(max_examples=300, suppress_health_check=[HealthCheck.large_base_example])
@given(streams(), st.randoms(use_true_random=False))
def test_chunks_joined_as_bytes_are_those_joined_decoded(stream: tuple[int, list[Json]], ways: random.Random) -> None:
    n, chunks = stream
    reply = Reply(samples=map(begun, range(n)))
    choices = made(reply, *(written(chunk, ways).encode() for chunk in chunks))
    expected = decoded_and_joined(n, chunks)
    told = without_stamps(expected["choices"])
    assert without_stamps(json.loads(encoded(choices))) == told
    assert without_stamps(opened(choices)) == told
    assert {"created": 5} | reply.head == {key: expected[key] for key in expected if key not in ("choices", "usage")}
    assert [sample.num_made for sample in reply.samples] == [len(choice["token_ids"] or ()) for choice in told]


@settings(max_examples=200, suppress_health_check=[HealthCheck.large_base_example])
@given(streams(), st.randoms(use_true_random=False))
def test_chunks_that_a_reader_joins_and_sends_make_the_same_samples(
    stream: tuple[int, list[Json]], ways: random.Random
) -> None:
    n, chunks = stream
    here, beside = (Reply(samples=map(begun, range(n))) for _ in range(2))
    events = [written(chunk, ways).encode() for chunk in chunks]
    direct = made(here, *events)
    told, waiting, ends = list[Chunk](), list[Chunk](), dict[int, int]()
    for place, event in enumerate(events, 1):
        waiting.append(Chunk.read(event))
        if ways.random() < 0.5 or place == len(events):
            told.append(Chunk.joined(waiting, ends))
            waiting = []
    for place, chunk in enumerate(told):
        chunk.shed(has_head=place == 0)
        content = msgspec.msgpack.encode(chunk)
        beside.take(msgspec.msgpack.decode(content, type=Chunk), beside.samples)
    for sample in beside.samples:
        sample.stamp()
    assert opened([sample.told(BARE) for sample in beside.samples]) == opened(direct)
    assert (beside.head, beside.usage, beside.prompt) == (here.head, here.usage, here.prompt)


@settings(max_examples=200, suppress_health_check=[HealthCheck.large_base_example])
@given(streams(), st.randoms(use_true_random=False))
def test_a_chunk_is_the_chunk_that_was_written(stream: tuple[int, list[Json]], ways: random.Random) -> None:
    for chunk in stream[1]:
        event = written(chunk, ways).encode()
        choices = [choice.fields() for choice in Chunk.read(event).choices]
        assert json.loads(encoded(choices)) == chunk["choices"]
        assert opened(choices) == chunk["choices"]


@settings(max_examples=100, suppress_health_check=[HealthCheck.large_base_example])
@given(sample_chunks(0), st.integers(0, 4), st.randoms(use_true_random=False))
def test_a_sample_in_two_parts_is_that_in_one(choices: list[Json], place: int, ways: random.Random) -> None:
    """The second part is of another version, and its engine reads the tokens of the first after the prompt."""
    for choice in choices:
        ids = choice.get("token_ids") or []
        choice |= {"weight_versions": None, "prompt_token_ids": None, "token_ids": ids}
        (choice.get("logprobs") or {}).pop("text_offset", None)
    whole, parted = begun(), begun()
    for number, choice in enumerate(choices):
        if number == place:
            parted.stamp()
            parted.keep()
            parted.begin(of_version(2))
            added(parted, choice | {"token_ids": [1, 2], "text": "of an attempt that failed"})
            parted.begin(of_version(2))
        event = written({"choices": [choice]}, ways).encode()
        for sample in (whole, parted):
            Reply().take(Chunk.read(event), [sample])
    parted.stamp()
    whole.stamp()
    told, expected = parted.told(BARE), whole.told(BARE)
    if place < len(choices):
        assert opened(without_stamps([told | {"resumed": 0}])) == opened(without_stamps([expected | {"resumed": 0}]))
    spans = [(span["version"], span["end"] - span["start"]) for span in told["weight_versions"]]
    assert sum(tokens for _, tokens in spans) == parted.num_made


@pytest.mark.parametrize(
    "content",
    [
        b"", b"<html>", b'{"a":1', b'{"a":NaN}', b'{"a":[1,]}', b'{"a":1}x', b"[1]", b'{"choices":[],"a":"\xff"}',
        b'{"a":01}', b'{"choices":[1,2]}', b'{"choices":[],"a":' + b"[" * 100_000, b'{"choices":[{"text":"a"}]}',
        b'{"choices":[{"index":1}]}', b'{"choices":[{"index":-1}]}', b'{"choices":[{"index":0,"token_ids":"a"}]}',
        b'{"choices":[{"index":0,"text":5}]}', b'{"choices":[{"index":0,"token_ids":[6],"logprobs":{"tokens":0.5}}]}',
    ],
)  # fmt: skip
def test_what_is_no_chunk_is_refused_and_leaves_the_tokens_before_it(content: bytes) -> None:
    reply = Reply(samples=[begun()])
    scored = {"index": 0, "text": "b", "token_ids": [5], "logprobs": {"tokens": ["b"]}}
    reply.take(Chunk.read(json.dumps({"choices": [scored]}).encode()), reply.samples)
    with pytest.raises(NO_JSON):
        reply.take(Chunk.read(content), reply.samples)
    [choice] = opened(made(reply))
    assert (choice["token_ids"], choice["text"], choice["logprobs"]) == ([5], "b", {"tokens": ["b"]})


@pytest.mark.parametrize("begin", [0, 2, 22, -1])
def test_offsets_are_those_of_names_wherever_a_chunk_counts_from(begin: int) -> None:
    sample, ends = Sample(0), dict[int, int]()
    for offsets in ([0, 11], [begin, begin + 11]):
        names = ["token_id:10"] * len(offsets)
        scores = {"text_offset": offsets, "token_logprobs": [-1.0, -1.0], "tokens": names}
        chunk = Chunk.read(encoded({"choices": [{"index": 0, "text": "ab", "logprobs": scores}]}))
        Reply().take(Chunk.joined([chunk], ends), [sample])
    assert opened(sample.told(BARE))["logprobs"]["text_offset"] == [0, 11, 22, 33]


def added(sample: Sample, told: Json) -> None:
    """Have the sample take a choice of an engine."""
    sample.add(*Chunk.read(encoded({"choices": [told]})).choices)


def told(text: str, token_ids: list[int], prompt: list[int]) -> Json:
    """A choice of version 0, which continues."""
    tokens = list(text)
    logprobs = {"text_offset": list(range(len(tokens))), "tokens": tokens, "token_logprobs": [-1.0] * len(tokens)}
    span = {"version": 0, "start": 0, "end": len(token_ids)}
    return {
        "index": 3, "text": text, "token_ids": token_ids, "prompt_token_ids": prompt, "finish_reason": CUT_OFF,
        "logprobs": logprobs, "weight_versions": [span], "kv_versions": [0],
    }  # fmt: skip


def test_tokens_that_were_left_out_of_the_rests_prompt_are_left_out_of_the_whole() -> None:
    sample = Sample.of(told("ab\N{REPLACEMENT CHARACTER}", [1, 2, 3], [9]))
    sample.keep()
    sample.begin(of_version(1))
    sample.num_read = 2
    added(sample, told("éc", [6, 7], [9, 1, 2]) | {"weight_versions": None})
    sample.stamp()
    both = opened(sample.told(BARE))
    assert (both["text"], both["token_ids"]) == ("abéc", [1, 2, 6, 7])
    assert both["logprobs"]["tokens"] == ["a", "b", "é", "c"]
    assert both["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert both["weight_versions"] == [
        {"version": 0, "start": 0, "end": 2}, {"version": 1, "start": 2, "end": 4},
    ]  # fmt: skip


def test_a_rest_that_was_aborted_before_its_first_token_leaves_all_of_the_first_part() -> None:
    sample = Sample.of(told("abc", [1, 2, 3], [8, 9]))
    before = opened(sample.told(BARE))
    sample.keep()
    sample.end("abort", 1)
    ended = {"finish_reason": "abort", "stop_reason": None, "weight_version": 1}
    assert opened(sample.told(BARE)) == before | ended


def test_a_part_has_the_spans_that_its_engine_reported_with_the_first_token_of_each_version() -> None:
    sample = begun(version=7)
    spans = [{"version": "0", "start": 0, "end": 3}, {"version": "1", "start": 3, "end": 4}]
    added(sample, {"index": 0, "token_ids": [1], "weight_versions": [{"version": "0", "start": 0, "end": 1}]})
    added(sample, {"index": 0, "token_ids": [2, 3, 4], "weight_versions": spans})
    added(sample, {"index": 0, "token_ids": [5, 6]})
    sample.stamp()
    assert sample.spans == [{"version": 0, "start": 0, "end": 3}, {"version": 1, "start": 3, "end": 6}]


@pytest.mark.parametrize(
    ("n", "limit", "goes_on", "fields", "is_whole"),
    [
        (1, 64, False, {}, True),
        (1, 65, False, {}, False),
        (2, 16, False, {}, False),
        (1, 9, True, {}, False),  # where engines die in a row
        (2, 16, False, {"prompt_logprobs": 0}, True),
        (2, 16, False, {"echo": True, "prompt_logprobs": None}, True),
        (2, 16, False, {"use_beam_search": True}, True),
    ],
)
async def test_short_samples_and_what_cannot_be_streamed_are_read_whole(
    rig: Rig, n: int, limit: int, goes_on: bool, fields: Json, is_whole: bool
) -> None:
    rollout = Rollout(request_id="a", model="sim", n=n, tokens=1, goes_on=goes_on)
    prompt = CompletionPrompt(request_id="a", index=0, rollout=rollout, body={"prompt": [5]} | fields, limit=limit)
    assert prompt.reads_whole(cast(Replica, rig.replicas[0])) == is_whole
