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


def test_a_whole_reply_counts_as_the_server_says() -> None:
    assert tokens_of(orjson.dumps(reply()), WORKLOAD) == 16


@pytest.mark.parametrize(
    "content",
    [
        orjson.dumps({"error": {"message": "no"}}),
        b"",
        orjson.dumps(reply(samples=1)),
        orjson.dumps(reply(tokens=None)),
        orjson.dumps(reply(tokens=15)),
    ],
)
def test_a_reply_that_is_not_whole_is_an_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        tokens_of(content, WORKLOAD)
