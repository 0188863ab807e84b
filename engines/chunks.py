"""Chunks of a reply, typed: what is looked at is decoded, and the rest stays as its engine wrote it.

A whole reply is one chunk.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from engines.raw_json import NULL, decoded, fields_of, opened

Json = dict[str, Any]

_BESIDE_HEAD = ("choices", "usage", "prompt_token_ids")


class Choice(Struct, gc=False):
    """A choice of a chunk. Its lists are JSON as the engine wrote it."""

    index: Annotated[int, Meta(ge=0)]
    finish_reason: str | None = None
    text: str | None = None
    token_ids: Raw = NULL
    prompt_token_ids: Raw = NULL
    logprobs: dict[str, Raw] | None = None
    weight_versions: list[Json] | None = None
    delta: Json | None = None
    written: Any = NULL
    """All of it, as the engine wrote it: as one value, or by field."""

    @classmethod
    def read(cls, written: Raw) -> "Choice":
        """Return a choice as its engine wrote it. Raise one of `NO_JSON` where it is none."""
        choice = _choice(written)
        choice.written = written
        return choice

    @property
    def told(self) -> Json:
        """All its fields, as its engine wrote them."""
        return fields_of(self.written) if isinstance(self.written, Raw) else self.written

    def fields(self) -> Json:
        """As `told`; null is None."""
        return {key: None if value == NULL else value for key, value in self.told.items()}


class Chunk(Struct, gc=False):
    """A chunk of a stream, or a whole reply. `prompt_token_ids` are told beside the choices, or with each of them."""

    choices: list[Choice]
    usage: Json | None = None
    prompt_token_ids: list[int] | None = None
    written: bytes | Json = {}
    """All of it as the engine wrote it, or the fields beside the choices."""

    @classmethod
    def read(cls, event: bytes) -> "Chunk":
        """Return a chunk as its engine wrote it. Raise one of `NO_JSON` where it is none."""
        if not event.isascii():
            event.decode()  # raw values are not checked for UTF-8
        chunk = _chunk(event)
        return cls(list(map(Choice.read, chunk.choices)), chunk.usage, chunk.prompt_token_ids, event)

    @property
    def head(self) -> Json:
        """The fields beside the choices."""
        if isinstance(self.written, dict):
            return self.written
        return {key: decoded(value) for key, value in fields_of(self.written).items() if key not in _BESIDE_HEAD}

    def decoded(self) -> Json:
        """The chunk as its engine wrote it, decoded."""
        return self.head | {"choices": [opened(choice.fields()) for choice in self.choices], "usage": self.usage}


class _Chunk(Struct, gc=False):
    choices: list[Raw]
    usage: Json | None = None
    prompt_token_ids: list[int] | None = None


_chunk = msgspec.json.Decoder(_Chunk).decode
_choice = msgspec.json.Decoder(Choice).decode
