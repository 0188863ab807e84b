"""What engines have made of a rollout: its samples, and what comes with them, whole or streamed, in any dialect.

A reply comes in chunks, so that the tokens are here if the engine dies; a whole reply is one chunk. Token ids and
log-probs, which are most of a reply, are joined as their engines wrote them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct

from engines.engine import Json
from gateway.dialects.raw_json import NULL, decoded, encoded, fields_of, inside_list, opened
from gateway.dialects.resumption.features import MARK
from gateway.dialects.spans import UNSCORED, joined_spans, num_unscored, stamps
from gateway.fleet.adapters import Adapter
from gateway.fleet.replica import Flight, Replica

CUT_OFF = "cut off"
"""The finish_reason of a choice that continues. No client sees it."""
ABORT = "abort"

_BESIDE_HEAD = ("choices", "usage", "prompt_token_ids")
_OFFSETS = "text_offset"
_TOKENS_SCORES = "token_logprobs"
_HALF = "\N{REPLACEMENT CHARACTER}"


class Choice(Struct, gc=False):
    """What is read of a choice of a chunk. Its lists are as the engine wrote them; other fields are for the client."""

    index: Annotated[int, Meta(ge=0)]
    finish_reason: str | None = None
    text: str | None = None
    token_ids: Raw = NULL
    prompt_token_ids: Raw = NULL
    logprobs: dict[str, Raw] | None = None
    weight_versions: list[Json] | None = None
    delta: Json | None = None


class Chunk(Struct, gc=False):
    """A chunk of a stream, or a whole reply. `prompt_token_ids` are told beside the choices, or with each of them."""

    choices: list[Choice]
    usage: Json | None = None
    prompt_token_ids: list[int] | None = None


class _AllOfChoices(Struct, gc=False):
    choices: list[dict[str, Raw]]


_chunk = msgspec.json.Decoder(Chunk).decode
_choice = msgspec.json.Decoder(Choice).decode
_all_of_choices = msgspec.json.Decoder(_AllOfChoices).decode


def read_chunk(event: bytes) -> Chunk:
    """Return a chunk. Raise one of `NO_JSON` where it is none."""
    if not event.isascii():
        event.decode()  # raw values are not checked for UTF-8
    return _chunk(event)


def all_of_choices(event: bytes) -> list[Json]:
    """Return the choices of a chunk with all their fields, as their engine wrote them; null is None."""
    return [
        {key: None if value == NULL else value for key, value in choice.items()}
        for choice in _all_of_choices(event).choices
    ]


class Source(NamedTuple):
    """The replica that makes a sample, the record of its flight there, and the adapter that it is made with."""

    replica: Replica
    flight: Flight
    adapter: Adapter | None


class Sample:
    """One sample as one replica makes it, or with its rests: what continues it is a sample too, until it is joined.

    `keeps_content` is False for a stream, whose client has text and log-probs. With `scores_alone` the log-probs of
    sampled tokens are kept, and no others.
    """

    def __init__(self, index: int, *, keeps_content: bool = True, scores_alone: bool = False) -> None:
        self.index = index
        self.source: Source | None = None
        """None where nobody makes it, or what was made counts no more."""
        self.reason: str | None = None
        """How it ended; None while it is open."""
        self.is_cut = False
        """True once its replica has ended it, and it continues elsewhere."""
        self.is_resumed = False
        self.num_made = 0
        """Tokens."""
        self.has_ids = False
        """False where the engine tells no token ids."""
        self.prompt = NULL
        """Token ids of the prompt, as told with this sample."""
        self.num_characters = 0
        self.num_unscored = 0
        """Tokens without a log-prob, where log-probs are asked for; those of a whole reply at its end."""
        self.spans: list[Json] | None = None
        """Of its tokens by weight version; None before they are known."""
        self.kv_versions: list[int] = []
        self.rest: Sample | None = None
        self._keeps_content, self._scores_alone = keeps_content, scores_alone
        # Items of lists, without brackets: few large buffers, since small objects leave holes in memory.
        self._ids = bytearray()
        self._lists: dict[str, bytearray] = {}
        self._scores: dict[str, Raw] | None = None  # of its only chunk with log-probs, as it came
        self._text: list[str] = []
        self._report: list[Json] = []  # the engine's last report of the spans
        self._last: tuple[bytes, int] | None = None  # the chunk with its last choice, whose index there it is
        self._end: Json = {}
        self.num_taken = 0
        """Tokens that `growth` has returned, of it and of its rest."""
        self._taken: dict[str, int] = {}  # bytes of each list, and pieces of text
        self._taken_rest: Sample | None = None
        self.is_taken = False
        """True once it has ended, and `growth` has returned that."""

    @classmethod
    def of(cls, told: Json) -> "Sample":
        """Return a sample that was told whole."""
        sample = cls(told["index"])
        sample.restore(told)
        return sample

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = decoded(b"[" + self._ids + b"]")
        return ids

    @property
    def num_tokens(self) -> int:
        """Tokens of the sample and of the rest that is made of it now."""
        return self.num_made + (self.rest.num_tokens if self.rest else 0)

    @property
    def is_open(self) -> bool:
        return self.reason is None

    @property
    def has_come(self) -> bool:
        """True once its engine has told anything of it."""
        return self._last is not None

    @property
    def shows_prompt(self) -> bool:
        """True where the client of a stream has the prompt's ids, which come with the first tokens."""
        return self.num_made > 0 or self.prompt != NULL

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def logprobs(self) -> dict[str, Any] | None:
        """The log-probs of all tokens: those of a single chunk as they came."""
        if self._scores is not None or not self._lists:
            return self._scores
        joined: dict[str, Any] = {key: Raw(b"[" + items + b"]") for key, items in self._lists.items()}
        if _OFFSETS in joined:  # each chunk counts from its own start, or from the text before, by the kind of engine
            names = decoded(joined["tokens"])
            joined[_OFFSETS] = list(accumulate(map(len, names[:-1]), initial=0))[: len(names)]
        return joined

    @property
    def last(self) -> Json:
        """All fields of its last choice, as it came; {} before any has come."""
        event, index = self._last or (b'{"choices":[]}', 0)
        fields = [choice for choice in _all_of_choices(event).choices if decoded(choice["index"]) == index]
        return fields[-1] | self._end if fields else self._end

    def add(self, choice: Choice, event: bytes) -> None:
        """Take a choice of a chunk. Raise `ValueError` where a list is of another kind; nothing is taken then."""
        token_ids = inside_list(choice.token_ids)
        if choice.logprobs:
            if self._keeps_content:
                self._add_scores(choice.logprobs)
            else:
                self.num_unscored += num_unscored(choice.logprobs, token_ids.count(b",") + 1 if token_ids else 0)
        if token_ids:
            if self._ids:
                self._ids += b","
            self._ids += token_ids
            self.num_made += token_ids.count(b",") + 1
        if choice.token_ids != NULL:
            self.has_ids = True
        if choice.text:
            self.num_characters += len(choice.text)
            if self._keeps_content:
                self._text.append(choice.text)
        if choice.prompt_token_ids != NULL:
            self.prompt = choice.prompt_token_ids
        if choice.weight_versions:
            self._report = choice.weight_versions
        self.reason = choice.finish_reason
        self._last = event, choice.index

    def add_told(self, told: Json) -> None:
        """Take a choice that was told to a client."""
        self.add(_choice(encoded(told)), encoded({"choices": [told]}))

    def restore(self, told: Json) -> None:
        """Take a choice that `growth` has returned, or one of a whole reply."""
        self.add_told(told)
        self.spans, self.kv_versions = list(told["weight_versions"]), told.get("kv_versions") or []
        self.is_resumed = MARK in told
        if self.reason == CUT_OFF:
            self.reason = None

    def _add_scores(self, scores: dict[str, Raw]) -> None:
        if self._scores_alone:
            scores = {_TOKENS_SCORES: scores[_TOKENS_SCORES]} if _TOKENS_SCORES in scores else {}
        if self._scores is None and not self._lists:
            self._scores = scores
            return
        more = _items_of(scores)
        self._take_apart()
        self._extend(more)

    def _take_apart(self) -> None:
        if self._scores is not None:
            self._lists, self._scores = {key: bytearray(items) for key, items in _items_of(self._scores).items()}, None

    def _extend(self, more: Mapping[str, bytes | bytearray]) -> None:
        for key, items in more.items():
            so_far = self._lists.setdefault(key, bytearray())
            if so_far and items:
                so_far += b","
            so_far += items

    def cut(self) -> None:
        """Take an end by an update as one that continues."""
        if self.reason == ABORT:
            self.reason, self.is_cut = None, True

    def tells(self, fields: Sequence[str]) -> bool:
        """True if its last choice has one of these fields."""
        last = self.last
        return any(opened(last.get(field)) for field in fields)

    def stamp(self, flight: Flight, adapter: Adapter | None, num_counted: int | None = None) -> None:
        """Note the weight versions of its tokens, once: it has ended, or continues elsewhere. `num_counted` is the
        engine's count of tokens without ids."""
        if self.spans is None:
            num = self.num_made if self.has_ids or self._last is None else num_counted
            self.spans, self.kv_versions = stamps(self._report, flight, num, adapter)

    @property
    def is_known(self) -> bool:
        """True where the weight versions of its tokens are known: no update overwrites its replica."""
        return self.spans is not None or (self.source is not None and self.source.replica.weight_version is not None)

    @property
    def num_bytes(self) -> int:
        """Size of its tokens and log-probs, and of its rest's."""
        own = len(self._ids) + sum(map(len, self._lists.values()))
        return own + (self.rest.num_bytes if self.rest else 0)

    def growth(self, num_prompt: int, inexact: Sequence[str] = ()) -> tuple[Json, bool] | None:
        """Return what it and its rest have got since the last call, as a choice, and True if that is all of it: the
        first time, or again where a part that was returned has become void. None where there is nothing, or of no known
        version."""
        if self._taken_rest is not None and self._taken_rest is not self.rest:
            self.take_again()
        rest = self.rest if self.rest and self.rest.num_made else None
        if rest is not None and not rest.is_known and rest is not self._taken_rest:
            rest = None
        if not self.is_known or (rest is not None and not rest.is_known):
            return None
        if rest is not None:
            self._fit(rest, num_prompt)
        made = self.num_made + (rest.num_made if rest else 0)
        ends = self.reason is not None and not self.is_taken and (self.has_ids or self.spans is not None)
        if made == self.num_taken and not ends:
            return None
        self.num_taken, self._taken_rest, self.is_taken = made, rest, self.reason is not None
        is_all = not self._taken
        new, (spans, kv_versions) = self._new_items(), self._stamps_now()
        if rest is not None:
            more, (its_spans, its_kv) = rest._new_items(), rest._stamps_now()
            new |= {key: b",".join(filter(None, (new.get(key), items))) for key, items in more.items()}
            spans, kv_versions = joined_spans(spans, its_spans, self.num_made), its_kv or kv_versions
        ids = Raw(b"[" + new.pop("token_ids") + b"]")
        told = (self.last if self.reason is not None else {}) | {
            "index": self.index,
            "finish_reason": self.reason,
            "token_ids": ids if self.has_ids or rest else None,
            "logprobs": {key: Raw(b"[" + items + b"]") for key, items in new.items()} or None,
            "text": self._new_text() + (rest._new_text() if rest else ""),
            "prompt_token_ids": None,
            "weight_versions": spans,
            "kv_versions": kv_versions,
        }
        return told | ({MARK: list(inexact)} if self.is_resumed or rest else {}), is_all

    def take_again(self) -> None:
        """Have `growth` return all from the start."""
        self.num_taken, self._taken, self._taken_rest, self.is_taken = 0, {}, None, False
        if self.rest is not None:
            self.rest.take_again()

    def _new_items(self) -> dict[str, bytes]:
        """The items of each list since the last call."""
        self._take_apart()
        lists = {"token_ids": self._ids, **self._lists}
        new = {key: bytes(items[self._taken.get(key, 0) :]).removeprefix(b",") for key, items in lists.items()}
        self._taken |= {key: len(items) for key, items in lists.items()}
        return new

    def _new_text(self) -> str:
        new = "".join(self._text[self._taken.get("text", 0) :])
        self._taken["text"] = len(self._text)
        return new

    def _stamps_now(self) -> tuple[list[Json], list[int]]:
        """The versions of its tokens so far, and of the KV under them."""
        if self.spans is not None:
            return self.spans, self.kv_versions
        assert self.source is not None
        return stamps(self._report, self.source.flight, self.num_made, self.source.adapter)

    def stamp_now(self) -> None:
        """Note the versions of its tokens, which are known, before its replica has ended all of the others."""
        self.spans, self.kv_versions = self._stamps_now()

    def settled(self, num_prompt: int) -> "Sample":
        """The sample once no replica makes more of it: with its rest, and without tokens of no known version."""
        rest, self.rest = self.rest, None
        if not self.is_known:
            return Sample(self.index, scores_alone=self._scores_alone)
        self.stamp_now()
        if rest is not None and rest.num_made and rest.is_known:
            rest.stamp_now()
            self.join(rest, num_prompt)
        return self

    def free(self) -> None:
        """Forget its content: the client has it."""
        self._ids, self._text, self._scores, self._lists = bytearray(), [], None, {}
        self.num_taken, self.is_taken = self.num_made, True

    def join(self, rest: "Sample", num_prompt: int) -> None:
        """Take the rest, for which an engine has read the prompt, of so many tokens, and these tokens, or most."""
        self._fit(rest, num_prompt)
        if self._taken_rest is not None and self._taken_rest is not rest:
            self.take_again()
        if not self.num_made and rest.prompt != NULL:
            self.prompt = rest.prompt
        self.spans = joined_spans(self.spans or [], rest.spans or [], self.num_made)
        self.kv_versions = rest.kv_versions or self.kv_versions
        self._take_apart()
        rest._take_apart()
        if self._taken_rest is rest:  # which comes behind all of this one's
            own = {"token_ids": self._ids, **self._lists}
            for key, items in {"token_ids": rest._ids, **rest._lists}.items():
                before = own.get(key, b"")
                self._taken[key] = len(before) + bool(before and items) + rest._taken.get(key, 0)
            self._taken["text"] = len(self._text) + rest._taken.get("text", 0)
        self._taken_rest = None
        self._ids += (b"," if self._ids and rest._ids else b"") + rest._ids
        self.num_made, self.has_ids = self.num_made + rest.num_made, self.has_ids or rest.has_ids
        self._text += rest._text
        self._extend(rest._lists)
        self.num_characters += rest.num_characters
        self.num_unscored += rest.num_unscored
        self.reason, self._last, self._end = rest.reason, rest._last, rest._end
        self.is_resumed, self.is_cut, self.rest = True, rest.is_cut, None

    def _fit(self, rest: "Sample", num_prompt: int) -> None:
        """Drop tokens that the engine of a rest has not read: they are a part of a character, which it has told as one
        of its own."""
        read = math.inf if rest.prompt == NULL else len(decoded(rest.prompt)) - num_prompt
        if rest.num_made and read < self.num_made:
            self._trim(int(read))
            self.take_again()

    def _trim(self, length: int) -> None:
        kept, self.num_made = self.token_ids[:length], length
        self._ids = bytearray(inside_list(Raw(encoded(kept))))
        self._text = [self.text.removesuffix(_HALF)]
        scores = opened(self.logprobs or {})
        self._lists = {}
        self._scores = {key: Raw(encoded(values and values[:length])) for key, values in scores.items()} or None

    def end(self, reason: str, version: int) -> None:
        """End it while no replica has it; a sample without tokens is of no version that made any."""
        self.reason = reason
        self.spans = self.spans or []
        self._end = {"finish_reason": reason, "stop_reason": None, "weight_version": version}

    def marks(self, inexact: Sequence[str] | None = None, before: "Sample | None" = None) -> Json:
        """The fields of its last choice that no engine tells. A rest has those of the sample `before` it too."""
        spans, kv_versions, unscored = self.spans or [], self.kv_versions, self.num_unscored
        if before is not None:
            spans = joined_spans(before.spans or [], spans, before.num_made)
            kv_versions, unscored = kv_versions or before.kv_versions, unscored + before.num_unscored
        marks: Json = {"weight_versions": spans}
        if kv_versions:
            marks["kv_versions"] = kv_versions
        if inexact and (before is not None or self.is_resumed):
            marks[MARK] = list(inexact)
        if unscored:
            marks[UNSCORED] = unscored
        return marks

    def told(self, bare: Json, inexact: Sequence[str] | None = None) -> Json:
        """The sample as a choice of a whole reply; `bare` is one without tokens."""
        scores = self.logprobs
        told = bare | {"stop_reason": None} | self.last
        told |= {"index": self.index, "logprobs": scores, "finish_reason": self.reason or CUT_OFF}
        if "text" in told:
            told["text"] = "".join(self._text)
        if self.has_ids:
            told["token_ids"] = Raw(b"[" + self._ids + b"]")
        if self.prompt != NULL and "prompt_token_ids" in told:
            told["prompt_token_ids"] = self.prompt
        told.pop("delta", None)
        if scores:
            self.num_unscored = num_unscored(scores, self.num_made)
        return told | self.marks(inexact)


def _items_of(scores: dict[str, Raw]) -> dict[str, bytes]:
    """The items of the lists of log-probs; offsets are counted again."""
    return {key: b"" if key == _OFFSETS else inside_list(value) for key, value in scores.items()}


class Reply:
    """The samples of one rollout, and what engines tell beside them.

    `prompt` are the token ids of the prompt, where they are known before an engine tells them.
    """

    def __init__(self, prompt: list[int] | None = None, samples: Iterable[Sample] = ()) -> None:
        self.head: Json = {}
        self.samples = list(samples)
        self._prompt = prompt
        self._usage: Json | None = None

    def read(self, event: bytes, samples: Sequence[Sample]) -> Chunk:
        """Take a chunk with choices of these samples: all, or one that stands for the rest of another. Raise one of
        `NO_JSON` where it is none."""
        chunk = read_chunk(event)
        for choice in chunk.choices:
            samples[choice.index].add(choice, event)
        if not self.head:
            self.head = {key: decoded(value) for key, value in fields_of(event).items() if key not in _BESIDE_HEAD}
        if chunk.usage and not [sample for sample in self.samples if sample.rest]:  # else it is that of a rest
            self._usage = chunk.usage
        if chunk.prompt_token_ids:
            self._prompt = chunk.prompt_token_ids
        return chunk

    @property
    def prompt(self) -> list[int] | None:
        """The token ids of the prompt; None where no engine has told them."""
        if self._prompt is None:
            told = [sample.prompt for sample in self.samples if sample.prompt != NULL]
            self._prompt = decoded(told[0]) if told else None
        return self._prompt

    @property
    def counted(self) -> int | None:
        """The engine's count of tokens; None where it has not come."""
        return (self._usage or {}).get("completion_tokens")

    @property
    def open(self) -> list[Sample]:
        """The samples that have not ended."""
        return [sample for sample in self.samples if sample.reason is None]

    @property
    def usage(self) -> Json:
        """The count of the engine; where samples continued, or it has not come, of the tokens that are here."""
        usage, continued = self._usage or {}, [sample for sample in self.samples if sample.rest or sample.is_resumed]
        if usage.get("completion_tokens") is not None and not continued:
            return usage
        read = usage.get("prompt_tokens") or len(self.prompt or ())
        made = sum([sample.num_tokens for sample in self.samples])
        return {**usage, "prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
