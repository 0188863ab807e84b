"""Completions and tokens of a reply of /v1/completions, counted after the measurement."""

from dataclasses import dataclass
from typing import Any

import orjson

from loadtests.workloads import Workload


@dataclass(frozen=True, slots=True)
class Delivered:
    """Ended completions, and their tokens by the server's count."""

    completions: int
    tokens: int


def read_reply(content: bytes, *, stream: bool) -> Delivered:
    """Count a reply. Raise `ValueError` for an incomplete one."""
    delivered = _read_events(content) if stream else _read_whole(content)
    if delivered is None:
        raise ValueError(f"no complete reply: ...{content[-200:]!r}")
    return delivered


def check_reply(delivered: Delivered, workload: Workload) -> None:
    """Raise `ValueError` if completions or tokens are missing: a run with losses has no valid speed."""
    if delivered.completions != workload.completions:
        raise ValueError(f"{delivered.completions} completions came, {workload.completions} were requested")
    if workload.tokens is not None and delivered.tokens != workload.tokens:
        raise ValueError(f"{delivered.tokens} tokens came, {workload.tokens} were requested")


def _read_whole(content: bytes) -> Delivered | None:
    reply = orjson.loads(content)
    if not isinstance(reply, dict) or "choices" not in reply:
        return None
    return Delivered(_ended(reply["choices"]), reply["usage"]["completion_tokens"])


def _read_events(content: bytes) -> Delivered | None:
    completions, tokens = 0, None
    events = [event[5:].strip() for event in content.split(b"\n\n") if event.startswith(b"data:")]
    if not events or events[-1] != b"[DONE]":
        return None
    for event in events[:-1]:
        chunk = orjson.loads(event)
        completions += _ended(chunk.get("choices", []))
        if usage := chunk.get("usage"):
            tokens = usage["completion_tokens"]
    return None if tokens is None else Delivered(completions, tokens)


def _ended(choices: list[dict[str, Any]]) -> int:
    return sum(choice.get("finish_reason") is not None for choice in choices)
