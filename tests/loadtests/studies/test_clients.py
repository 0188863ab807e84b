"""Replies that count as delivered, and replies that count as errors."""

from typing import Any

import orjson
import pytest

from loadtests.studies.clients import tokens_of
from loadtests.workloads import LengthMix, Workload

WORKLOAD = Workload(prompts=1, samples=2, prompt_tokens=LengthMix.parse("4"), max_tokens=8)


def reply(samples: int = 2, tokens: int | None = 16) -> dict[str, Any]:
    choices = [{"index": index, "text": "", "finish_reason": "length"} for index in range(samples)]
    return {"choices": choices} | ({} if tokens is None else {"usage": {"completion_tokens": tokens}})


def events(*chunks: object, done: bool = True) -> bytes:
    data = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    return b"".join([*data, b"data: [DONE]\n\n"] if done else data)


def test_a_whole_reply_and_a_streamed_one_count_alike() -> None:
    assert tokens_of(orjson.dumps(reply()), WORKLOAD, stream=False) == 16
    usage = {"choices": [], "usage": {"completion_tokens": 16}}
    assert tokens_of(events(reply(tokens=None), usage), WORKLOAD, stream=True) == 16


@pytest.mark.parametrize(
    ("content", "stream"),
    [
        (orjson.dumps({"error": {"message": "no"}}), False),
        (b"", False),
        (b"", True),
        (events(reply(), done=False), True),
        (events(reply(tokens=None)), True),
    ],
)
def test_a_reply_that_is_not_whole_is_an_error(content: bytes, stream: bool) -> None:
    with pytest.raises(ValueError, match=r"."):
        tokens_of(content, WORKLOAD, stream=stream)
