"""Digests of conversations: equal where a client has sent back what an answer said, in whatever JSON."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

from engines.engine import Json
from engines.raw_json import NO_JSON, decoded
from gateway.agents.turn import Turn

SIZE = 8
"""Bytes of a digest."""
_bytes = msgspec.json.Encoder(order="sorted").encode


def settings_digest(turn: Turn) -> bytes:
    """Return the digest of what a template reads beside the messages."""
    return blake2b(_bytes([turn.model, turn.tools, turn.template]), digest_size=SIZE).digest()


def message_digests(messages: list[Json]) -> Iterator[bytes]:
    """Yield after each message the digest of it and all before it."""
    chain = blake2b(digest_size=SIZE)
    for message in messages:
        said = _bytes(_canonical(message))
        chain.update(len(said).to_bytes(8, "little") + said)
        yield chain.digest()


def _canonical(message: Json) -> list[Any]:
    """What a message says. Clients drop reasoning, make new ids, move `cache_control`, trim texts, cut them into other
    parts, and write the arguments of calls in their own JSON."""
    texts, others = [], []
    content = message.get("content") or ""
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part.get("type") == "text":
            texts.append(str(part.get("text", "")))
        else:
            others.append({name: value for name, value in part.items() if name != "cache_control"})
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    asked = [[call["name"], _arguments(call.get("arguments"))] for call in calls]
    return [message["role"], "".join(texts).strip(), others, asked]


def _arguments(given: Any) -> Any:
    try:
        return _plain(decoded(given or "{}") if isinstance(given, str) else given or {})
    except NO_JSON:
        return given


def _plain(value: Any) -> Any:
    """JSON as JavaScript writes it back, which has no other 1.0 than 1."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case _:
            return value
