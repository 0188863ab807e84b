"""Images, sound and video of a conversation: opaque bytes, which a session's record has once."""

from base64 import b64decode
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import msgspec

from engines.engine import Json
from engines.raw_json import encoded

_TEXT = "text", "input_text", "output_text", "refusal", "thinking", "tool_reference"


class Media(msgspec.Struct, tag="media", array_like=True, frozen=True):
    """One content under its digest. What came in base64 is the bytes themselves, as a file of its `media_type` has
    them; an address is text/uri-list, and a part of another form is the JSON that the client sent."""

    id: str
    media_type: str
    data: bytes


def media_in(messages: Iterable[Json]) -> Iterator[Json]:
    """Yield the parts of messages that are no text, in their order in the prompt."""
    for message in messages:
        content = message.get("content")
        yield from (part for part in content if part.get("type") not in _TEXT) if isinstance(content, list) else ()


def id_of(part: Json) -> str:
    """Return the digest of a part."""
    return blake2b(encoded(part), digest_size=16).hexdigest()


def media_of(part: Json) -> Media:
    """Return the content of a part of a message."""
    match part:
        case {"type": "input_audio", "input_audio": {"data": str(text), "format": str(form)}}:
            media_type = f"audio/{form}"
        case {"image_url": {"url": str(url)}} | {"video_url": {"url": str(url)}} | {"audio_url": {"url": str(url)}}:
            head, _, text = url.partition(";base64,")
            if not (text and head.startswith("data:")):
                return Media(id_of(part), "text/uri-list", url.encode())
            media_type = head.removeprefix("data:")
        case _:
            return Media(id_of(part), "application/json", encoded(part))
    try:
        return Media(id_of(part), media_type, b64decode(text, validate=True))
    except ValueError:
        return Media(id_of(part), "application/json", encoded(part))
