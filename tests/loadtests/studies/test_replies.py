"""Replies that count as delivered, and replies that count as errors."""

import orjson
import pytest

from loadtests.studies.replies import Delivered, check_reply, read_reply
from loadtests.workloads import LengthMix, Workload

WORKLOAD = Workload(prompts=1, samples=2, prompt_tokens=LengthMix.parse("4"), max_tokens=8)


def choice(reason: str | None = "length") -> dict[str, object]:
    return {"index": 0, "text": "", "finish_reason": reason}


def events(*chunks: object, done: bool = True) -> bytes:
    data = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    return b"".join([*data, b"data: [DONE]\n\n"] if done else data)


def test_a_whole_reply() -> None:
    content = orjson.dumps({"choices": [choice(), choice()], "usage": {"completion_tokens": 16}})
    assert read_reply(content, stream=False) == Delivered(completions=2, tokens=16)


def test_a_streamed_reply() -> None:
    content = events(
        {"choices": [choice(None)]}, {"choices": [choice()]}, {"choices": [], "usage": {"completion_tokens": 8}}
    )
    assert read_reply(content, stream=True) == Delivered(completions=1, tokens=8)


@pytest.mark.parametrize(
    ("content", "stream"),
    [
        (orjson.dumps({"error": {"message": "no"}}), False),
        (b"", False),
        (b"", True),
        (events({"choices": [choice()], "usage": {"completion_tokens": 8}}, done=False), True),
        (events({"choices": [choice()]}), True),
    ],
)
def test_a_reply_that_is_not_whole_is_an_error(content: bytes, stream: bool) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_reply(content, stream=stream)


def test_missing_completions_and_tokens_are_errors() -> None:
    check_reply(Delivered(2, 16), WORKLOAD)
    with pytest.raises(ValueError, match="1 completions came, 2 were requested"):
        check_reply(Delivered(1, 16), WORKLOAD)
    with pytest.raises(ValueError, match="15 tokens came, 16 were requested"):
        check_reply(Delivered(2, 15), WORKLOAD)
