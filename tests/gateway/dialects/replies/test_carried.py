"""Replies carried as bytes are the replies that they were, however an engine writes its JSON.

The joining of chunks is compared with one that decodes each: plain, and too slow for a gateway.
"""

import json
import random
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.engine import Json
from engines.errors import EngineFailed
from gateway.dialects.replies.assembly import Assembly
from gateway.dialects.replies.carried import carried_chunk, carried_reply, encoded, num_tokens, opened

ODD_TEXTS = st.sampled_from(
    ["", "a", "word ", '"', "\\", '","', '"],["', "][", '\\"][', "}][{", "\u2028", "\0", "\N{GRINNING FACE}", "é" * 20]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
NUMBERS = st.integers(0, 2**40) | st.just(2**62)
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
            choice["prompt_token_ids"] = draw(st.none() | st.lists(NUMBERS, max_size=12))
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
            "token_ids": [token_id for part in parts for token_id in part.get("token_ids") or ()],
            "logprobs": logprobs or None,
            "prompt_token_ids": next(filter(None, (part.get("prompt_token_ids") for part in reversed(parts))), None),
        }
        reply["choices"].append({"stop_reason": None, "prompt_logprobs": None, **parts[-1], **joined})
    return reply


@settings(max_examples=300, suppress_health_check=[HealthCheck.large_base_example])
@given(streams(), st.randoms(use_true_random=False))
def test_chunks_joined_as_bytes_are_those_joined_decoded(stream: tuple[int, list[Json]], ways: random.Random) -> None:
    n, chunks = stream
    events = [written(chunk, ways).encode() for chunk in chunks]
    assembly = Assembly(n, "a")
    while events:
        together = ways.randint(1, len(events))
        assembly.add(events[:together])
        events = events[together:]
    reply = assembly.reply()
    expected = decoded_and_joined(n, chunks)
    assert [num_tokens(choice["token_ids"]) for choice in reply["choices"]] == [
        len(choice["token_ids"]) for choice in expected["choices"]
    ]
    assert json.loads(encoded(reply)) == expected
    assert opened(reply) == expected


@settings(max_examples=200, suppress_health_check=[HealthCheck.large_base_example])
@given(streams(), st.randoms(use_true_random=False))
def test_a_whole_reply_is_the_reply_that_was_written(stream: tuple[int, list[Json]], ways: random.Random) -> None:
    reply = decoded_and_joined(*stream)
    carried = carried_reply(written(reply, ways).encode(), "/v1/completions", "a")
    assert json.loads(encoded(carried)) == reply
    assert opened(carried) == reply
    for choice, expected in zip(carried["choices"], reply["choices"], strict=True):
        assert num_tokens(choice["token_ids"]) == len(expected["token_ids"])
        for field in ("index", "finish_reason"):
            assert choice[field] == expected[field]


@settings(max_examples=200, suppress_health_check=[HealthCheck.large_base_example])
@given(streams(), st.randoms(use_true_random=False))
def test_a_chunk_is_the_chunk_that_was_written(stream: tuple[int, list[Json]], ways: random.Random) -> None:
    for chunk in stream[1]:
        carried = carried_chunk(written(chunk, ways).encode())
        assert json.loads(encoded(carried)) == chunk
        assert opened(carried) == chunk
        for choice, expected in zip(carried["choices"], chunk["choices"], strict=True):
            assert {key: choice[key] for key in choice if key != "logprobs"} == {
                key: expected[key] for key in expected if key != "logprobs"
            }


@pytest.mark.parametrize(
    "content",
    [
        b"", b"<html>", b'{"a":1', b'{"a":NaN}', b'{"a":[1,]}', b'{"a":1}x', b"[1]", b'{"text":"\xff"}', b'{"a":01}',
        b'{"choices":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}', b'{"a":' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_reply_is_a_failure_of_the_engine(content: bytes) -> None:
    if content:
        with pytest.raises(EngineFailed, match="did not answer JSON"):
            carried_reply(content, "/", "a")
    else:
        assert carried_reply(content, "/", "a") == {}


def joined(*events: bytes) -> Json:
    assembly = Assembly(1, "a")
    for one in events:
        assembly.add([one])
    return assembly.reply()
