"""JSON that is passed on as it came: a value that nobody looks at stays a `msgspec.Raw`, the bytes of its JSON."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw

NULL = Raw(b"null")
EMPTY = b"[]"
NO_JSON = (ValueError, TypeError, LookupError, OverflowError, RecursionError)
"""The errors of a decoder, and of values that are of another kind than expected."""

_LINE_ENDS = [(character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\u0085\u2028\u2029"]

decoded = msgspec.json.Decoder().decode
encoded = msgspec.json.Encoder().encode
"""Returns JSON: raw values as they came, and NaN as null."""
fields_of = msgspec.json.Decoder(dict[str, Raw]).decode


def opened(value: Any) -> Any:
    """Return a value decoded, with all values in it."""
    match value:
        case Raw():
            return decoded(value)
        case dict():
            return {key: opened(item) for key, item in value.items()}
        case list() if any(isinstance(item, Raw | dict) for item in value):
            return [opened(item) for item in value]
        case _:
            return value


def event(body: Any) -> bytes:
    """Return a server-sent event. It is one line to httpx (`aiter_lines`) too: JSON escapes no Unicode line end."""
    data = encoded(body)
    if not data.isascii():
        for character, escape in _LINE_ENDS:
            data = data.replace(character, escape)
    return b"data: " + data + b"\n\n"


def list_of(value: Raw) -> bytes | None:
    """Return the JSON of a list, an empty one as `EMPTY`; None for null. Raise `ValueError` for another value."""
    content = bytes(value)
    if content[:1] == b"[":
        return EMPTY if content[1:-1].isspace() else content
    if content == b"null":
        return None
    raise ValueError(f"a value is {content!r:.80}, no list")


def joined_lists(lists: Iterable[bytes]) -> bytes:
    """Return lists as one, in JSON."""
    return b"[" + b",".join([one[1:-1] for one in lists if one != EMPTY]) + b"]"
