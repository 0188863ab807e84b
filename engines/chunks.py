"""Chunks of a reply, typed: what is looked at is decoded once, and the rest stays as its engine wrote it.

A whole reply is one chunk.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from engines.raw_json import EMPTY, NULL, decoded, encoded, fields_of, joined_lists, list_of

Json = dict[str, Any]

OFFSETS = "text_offset"
_NULL = bytes(NULL)
_BESIDE_HEAD = ("choices", "usage", "prompt_token_ids")


class Choice(Struct, array_like=True, gc=False):
    """A choice of a chunk. Its lists are JSON; None is null, or not told."""

    index: int
    finish_reason: str | None = None
    text: str | None = None
    token_ids: bytes | None = None
    num_tokens: int = 0
    prompt_token_ids: bytes | None = None
    logprobs: dict[str, bytes] | None = None
    num_unscored: int = 0
    """How many of its tokens lack their log-prob, where it has log-probs."""
    weight_versions: list[Json] | None = None
    delta: Json | None = None
    written: bytes = b"{}"
    """JSON of the fields that are not among those, or of its chunk; the others do not count, unless they are null."""

    @classmethod
    def of(cls, read: "_Choice", written: bytes) -> "Choice":
        token_ids, scores = list_of(read.token_ids), None
        num_tokens = 0 if token_ids is None or token_ids == EMPTY else token_ids.count(b",") + 1
        if read.logprobs is not None:
            scores = {key: list_of(value) or _NULL for key, value in read.logprobs.items()}
        return cls(
            read.index, read.finish_reason, read.text, token_ids, num_tokens, list_of(read.prompt_token_ids),
            scores, num_unscored(scores, num_tokens) if scores else 0, read.weight_versions, read.delta, written,
        )  # fmt: skip

    @property
    def others(self) -> dict[str, Raw]:
        """The fields that are not among those, as their engine wrote them, and null ones."""
        told = fields_of(self.written)
        if "choices" in told:
            (told,) = _fields_of_choices(told["choices"])
        for key in _CHOICE_FIELDS & told.keys():
            if told[key] != NULL:
                del told[key]
        return told

    @property
    def scores(self) -> dict[str, Raw] | None:
        """Its log-probs."""
        scores = self.logprobs
        return None if scores is None else dict(zip(scores, map(Raw, scores.values()), strict=True))

    def fields(self) -> Json:
        """All its fields."""
        told: Json = {key: None if value == NULL else value for key, value in self.others.items()}
        read = {
            "token_ids": self.token_ids and Raw(self.token_ids),
            "prompt_token_ids": self.prompt_token_ids and Raw(self.prompt_token_ids),
            "index": self.index,
            "finish_reason": self.finish_reason,
            "text": self.text,
            "logprobs": self.scores,
            "weight_versions": self.weight_versions,
            "delta": self.delta,
        }
        return told | {key: value for key, value in read.items() if value is not None}


class Chunk(Struct, array_like=True, gc=False):
    """A chunk of a stream, or a whole reply. `prompt_token_ids` are told beside the choices, or with each of them."""

    choices: list[Choice]
    usage: Json | None = None
    prompt_token_ids: list[int] | None = None
    written: bytes = b"{}"
    """JSON of the other fields; those in it do not count."""

    @classmethod
    def read(cls, event: bytes) -> "Chunk":
        """Return a chunk as its engine wrote it. Raise one of `NO_JSON` where it is none."""
        chunk = _chunk(event)
        # Several have their own fields each, or the last of many would be looked for among all.
        written = [event] if len(chunk.choices) == 1 else map(encoded, _fields_of_choices(fields_of(event)["choices"]))
        return cls(list(map(Choice.of, chunk.choices, written)), chunk.usage, chunk.prompt_token_ids, event)

    @classmethod
    def joined(cls, chunks: Sequence["Chunk"], ends: dict[int, int]) -> "Chunk":
        """Return chunks as one. `ends` are those of the names of tokens in the chunks before, by choice: engines count
        places from the start of a chunk, or from the text before it. Deltas of conversations are not joined: their
        tokens are, of which an engine makes the message."""
        by_index: dict[int, list[Choice]] = {}
        for chunk in chunks:
            for choice in chunk.choices:
                by_index.setdefault(choice.index, []).append(choice)
        choices = list(map(joined, by_index.values()))
        for choice in choices:
            if (scores := choice.logprobs) is not None and OFFSETS in scores:
                scores[OFFSETS], ends[choice.index] = offsets_of(scores["tokens"], ends.get(choice.index, 0))
        usage = next((chunk.usage for chunk in reversed(chunks) if chunk.usage), None)
        read = next((chunk.prompt_token_ids for chunk in chunks if chunk.prompt_token_ids), None)
        return cls(choices, usage, read, chunks[0].written)

    @property
    def head(self) -> Json:
        """The fields beside the choices."""
        told = fields_of(self.written)
        for key in _BESIDE_HEAD:
            told.pop(key, None)
        return dict(decoded(encoded(told)))

    def shed(self, *, has_head: bool) -> None:
        """Drop what it has twice, and its head where that was told."""
        self.written = encoded(self.head) if has_head else b"{}"
        for choice in self.choices:
            choice.written = encoded(choice.others)


def joined(choices: list[Choice]) -> Choice:
    """The choices of one sample as one."""
    last = choices[-1]
    if len(choices) == 1:
        return last
    texts = [choice.text for choice in choices if choice.text is not None]
    whole = Choice(last.index, last.finish_reason, "".join(texts) if texts else None, written=last.written)
    if ids := [choice.token_ids for choice in choices if choice.token_ids is not None]:
        whole.token_ids = joined_lists(ids)
    whole.logprobs = _joined_scores([choice.logprobs for choice in choices if choice.logprobs])
    for choice in choices:
        whole.num_tokens += choice.num_tokens
        whole.num_unscored += choice.num_unscored
        whole.prompt_token_ids = choice.prompt_token_ids or whole.prompt_token_ids
        whole.weight_versions = choice.weight_versions or whole.weight_versions
    return whole


def _joined_scores(scores: list[dict[str, bytes]]) -> dict[str, bytes] | None:
    if len(scores) < 2:
        return scores[0] if scores else None
    joined = {}
    for key in dict.fromkeys(chain(*scores)):
        lists = [one for score in scores if (one := score.get(key, _NULL)) != _NULL]
        joined[key] = joined_lists(lists) if lists else _NULL
    return joined


def num_unscored(scores: dict[str, Any], made: int) -> int:
    """How many of the last `made` tokens lack their log-prob: NaN comes from engines as null. With `echo` the prompt's
    log-probs come before those of the tokens. Lists are decoded, or JSON."""
    values = scores.get("token_logprobs") or scores.get("content")
    # Numbers have no letter, and one letter is found many times faster than a word.
    if not values or not made or (isinstance(values, bytes) and (b"n" not in values or b"null" not in values)):
        return 0
    entries = decoded(values) or () if isinstance(values, bytes) else values
    return sum((entry["logprob"] if isinstance(entry, dict) else entry) is None for entry in entries[-made:])


def offsets_of(names: bytes, begin: int = 0) -> tuple[bytes, int]:
    """The place of each token in a text whose tokens before it end at `begin`, and the end of the last."""
    *places, end = accumulate(map(len, decoded(names)), initial=begin)
    return encoded(places), end


class _Choice(Struct, gc=False):
    index: Annotated[int, Meta(ge=0)]
    finish_reason: str | None = None
    text: str | None = None
    token_ids: Raw = NULL
    prompt_token_ids: Raw = NULL
    logprobs: dict[str, Raw] | None = None
    weight_versions: list[Json] | None = None
    delta: Json | None = None


class _Chunk(Struct, gc=False):
    choices: list[_Choice]
    usage: Json | None = None
    prompt_token_ids: list[int] | None = None


_CHOICE_FIELDS = frozenset(_Choice.__struct_fields__)
_chunk = msgspec.json.Decoder(_Chunk).decode
_fields_of_choices = msgspec.json.Decoder(list[dict[str, Raw]]).decode
