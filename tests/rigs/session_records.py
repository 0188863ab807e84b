"""Records of sessions as the gateway sends them, made up."""

import math
from array import array
from typing import Any

from hypothesis import strategies as st

from loadtests.sessions.judge import ARRAYS
from trainer_client.sessions.records import Session, read_session

Json = dict[str, Any]

MASKS = (None, None, None, "cut", "client_left", "failed", "unparsed", "no_token_ids")


def call(
    number: int,
    parent: Json | None = None,
    prompt: tuple[int, ...] = (5, 6),
    ids: tuple[int, ...] = (7, 8),
    **more: Any,
) -> Json:
    """Return the record of a call, with ids and log-probs as lists; version 3 made its tokens."""
    before = 0 if parent is None else parent["prompt_tokens"] + len(parent["token_ids"])
    return {
        "type": "call", "call": number, "parent": None if parent is None else parent["call"], "dialect": "messages",
        "root_reason": "first" if parent is None else None, "agent": None, "window": None, "model": "sim",
        "began": 1.0, "ended": 2.0, "state": "ended", "mask": None, "prompt_tokens": before + len(prompt),
        "prompt_token_ids": list(prompt), "token_ids": list(ids),
        "logprobs": [-0.5 - number - 0.25 * place for place in range(len(ids))],
        "weight_versions": [{"version": 3, "start": 0, "end": len(ids)}], "finish_reason": "stop", "stop_reason": None,
        "sampling": {}, "reward": None, "error": None, "retry_of": None, **more,
    }  # fmt: skip


def events(*calls: Json, **head: Any) -> list[Json]:
    """Return the records of a session."""
    named = {"id": "s", "state": "frozen", "began": 0.5, "reward": 1.0, "schema_version": 1, "durable": True}
    first = {"type": "session", **named, "calls": len(calls), "open_calls": 0, **head}
    return [first, *calls, {"type": "end", "calls": len(calls)}]


def session_of(records: list[Json]) -> Session:
    """Return the session in records, whose ids and log-probs come as bytes."""
    return read_session([record | _arrays(record) for record in records])


def _arrays(record: Json) -> Json:
    given = {name: (kind, record.get(name)) for name, kind in ARRAYS.items()}
    return {name: array(kind, value).tobytes() for name, (kind, value) in given.items() if value is not None}


@st.composite
def sessions(draw: st.DrawFn) -> list[Json]:
    """Any session: a forest of calls with subagents, forks, retries, masks and missing log-probs."""
    calls: list[Json] = []
    token = iter(range(100, 10_000_000))  # each sampled token once in a session
    for number in range(draw(st.integers(0, 12))):
        twin = draw(st.sampled_from(calls)) if calls and draw(st.integers(0, 4)) == 0 else None
        parent = draw(st.sampled_from([None, *calls]))
        prompt = tuple(draw(st.lists(st.integers(3, 50), min_size=1, max_size=4)))
        if twin is not None:
            parent = None if twin["parent"] is None else calls[twin["parent"]]
            prompt = tuple(twin["prompt_token_ids"])
        ids = tuple(next(token) for _ in range(draw(st.integers(0, 5))))
        made = call(number, parent, prompt, ids, mask=draw(st.sampled_from(MASKS)))
        if twin is not None:
            made["retry_of"] = twin["call"]
        made["logprobs"] = [draw(st.sampled_from([-0.5, -1.25, math.nan])) for _ in ids]
        if draw(st.integers(0, 9)) == 0:
            made["logprobs"] = None
        calls.append(made)
    return events(*calls)
