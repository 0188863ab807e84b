"""Replies carried as their engine wrote them: split into fields, and a field is decoded where it is looked at.

A carried value is a `msgspec.Raw`: the bytes of a JSON value. Short values are decoded at once, since to look at them
costs next to nothing; so a long list may be carried, and a short or empty one never is.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from engines.engine import Json
from engines.errors import EngineFailed

_SHORT_BYTES = 32
_DECODED = ("index", "finish_reason", "stop_reason", "weight_versions", "usage")

NULL, EMPTY = Raw(b"null"), Raw(b"[]")
NO_JSON = (ValueError, RecursionError)
"""The errors of a decoder; msgspec's own are of the first kind."""


class _Choices(msgspec.Struct, gc=False):
    choices: list[dict[str, Raw]]


_choices = msgspec.json.Decoder(_Choices).decode
_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_list_of_fields = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_decoded = msgspec.json.Decoder().decode
_encoded = msgspec.json.Encoder().encode


def carried_reply(content: bytes, path: str, replica_id: str) -> Json:
    """Return a whole reply, its choices split into fields. Raise `EngineFailed` where it is no JSON object."""
    try:
        check_text(content)
        reply = _read(_fields(content or b"{}"))
        if isinstance(choices := reply.get("choices"), Raw):
            reply["choices"] = [_read(choice) for choice in _list_of_fields(choices)]
    except NO_JSON as error:
        raise EngineFailed(f"{path} did not answer JSON: {content[:200]!r}", replica_id=replica_id) from error
    return reply


def carried_chunk(content: bytes) -> Json:
    """Return a chunk of a stream, decoded but for the log-probs of its choices, which are most of it. Raise one of
    `NO_JSON` where it is none."""
    check_text(content)
    fields = _fields(content)
    choices = _list_of_fields(fields.pop("choices", NULL))
    chunk = {key: _decoded(value) for key, value in fields.items()}
    return chunk | {"choices": [{key: _looked_at(key, value) for key, value in choice.items()} for choice in choices]}


def _looked_at(key: str, value: Raw) -> Any:
    return value if key == "logprobs" and len(value) > _SHORT_BYTES else _decoded(value)


def head_of(chunk: bytes) -> Json:
    """Return the fields of a chunk beside its choices and its usage."""
    fields = _fields(chunk)
    return _read({key: value for key, value in fields.items() if key not in ("choices", "usage")})


def choice_of(chunk: bytes, index: int) -> Json:
    """Return the fields of the last choice of a chunk that has this index."""
    choices = map(_read, reversed(_choices(chunk).choices))
    return next(choice for choice in choices if choice["index"] == index)


def opened(value: Any) -> Any:
    """Return a value of a reply decoded, with all values in it."""
    match value:
        case Raw():
            return _decoded(value)
        case dict():
            return {key: opened(item) for key, item in value.items()}
        case list() if any(isinstance(item, Raw | dict) for item in value):
            return [opened(item) for item in value]
        case _:
            return value


def num_tokens(token_ids: Any) -> int:
    """Return the length of a list of token ids, carried or decoded; None has none."""
    if not isinstance(token_ids, Raw):
        return len(token_ids or ())
    return 0 if token_ids == EMPTY else bytes(token_ids).count(b",") + 1


def num_unscored(choice: Json) -> int:
    """Return how many tokens of a choice lack their log-prob, where it has log-probs: NaN comes from engines as null.

    With `echo` the prompt's log-probs come before those of the tokens.
    """
    scores, made = choice.get("logprobs"), num_tokens(choice.get("token_ids"))
    if isinstance(scores, dict):
        scores = scores.get("token_logprobs") or scores.get("content")
    if not scores or not made or (isinstance(scores, Raw) and b"null" not in bytes(scores)):
        return 0
    scores = opened(scores)
    if isinstance(scores, dict):
        scores = scores.get("token_logprobs") or scores.get("content") or ()
    return sum((score["logprob"] if isinstance(score, dict) else score) is None for score in scores[-made:])


def of_text(value: Raw) -> bytes:
    """Return a text without its delimiters; null has nothing. Raise `ValueError` for a value of another kind."""
    content = bytes(value)
    return content[1:-1] if content[:1] == b'"' else _nothing(content, b'"')


def of_list(value: Raw) -> bytes:
    """As `of_text`, for a list."""
    content = bytes(value)
    if content[:1] != b"[":
        return _nothing(content, b"[")
    inside = content[1:-1]
    return b"" if inside.isspace() else inside


def _nothing(content: bytes, begin: bytes) -> bytes:
    """Return what null has."""
    if content != b"null":
        raise ValueError(f"a value is {content!r:.80}, which does not begin with {begin!r}")
    return b""


def text_of(insides: bytearray) -> Raw:
    """Return texts, one after the other, out of what `of_text` has returned. The buffer becomes the value."""
    insides[:0] = b'"'
    insides += b'"'
    return Raw(insides)


def list_of(insides: bytearray) -> Raw:
    """As `text_of`, for lists, each after a comma."""
    insides[:1] = b"["
    insides += b"]"
    return Raw(insides)


def encoded(value: Any) -> bytes:
    """Return JSON: carried values as they came, and NaN as null."""
    return _encoded(value)


def check_text(content: bytes | bytearray) -> None:
    """Raise `UnicodeDecodeError` for bytes that are no UTF-8: carried values are not checked for it."""
    if not content.isascii():
        content.decode()


def _read(fields: Mapping[str, Raw]) -> Json:
    return {
        key: _decoded(value) if len(value) <= _SHORT_BYTES or key in _DECODED else value
        for key, value in fields.items()
    }
