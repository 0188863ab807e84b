"""What engines have made of a rollout: its samples, and what is told beside them, whole or streamed, in any dialect.

A reply comes in chunks, so that the tokens are here if the engine dies; a whole reply is one chunk. Log-probs, which
are most of a reply, are joined as their engines wrote them.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from msgspec import Raw, Struct

from engines.engine import Json
from gateway.dialects.raw_json import decoded, encoded, fields_of, inside_list, opened
from gateway.dialects.resumption.features import MARK
from gateway.dialects.spans import UNSCORED, joined_spans, num_unscored, stamps
from gateway.fleet.adapters import Adapter
from gateway.fleet.flight import Flight

CUT_OFF = "cut off"
"""The finish_reason of a choice that continues. No client sees it."""
ABORT = "abort"

_CARRIED = ("logprobs", "prompt_token_ids", "prompt_logprobs")
_SHORT_BYTES = 4  # null, or an empty list
_BESIDE_HEAD = ("choices", "usage", "prompt_token_ids")
_OFFSETS = "text_offset"
_HALF = "\N{REPLACEMENT CHARACTER}"


class Chunk(Struct, gc=False):
    """A chunk of a stream, or a whole reply. `prompt_token_ids` are told beside the choices, or with each of them."""

    choices: list[Any]
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None


class _RawChunk(Chunk, gc=False):
    choices: list[dict[str, Raw]]


_raw_chunk = msgspec.json.Decoder(_RawChunk).decode


def read_chunk(event: bytes) -> Chunk:
    """Return a chunk; long values that nobody looks at stay raw. Raise one of `NO_JSON` where it is none."""
    if not event.isascii():
        event.decode()  # raw values are not checked for UTF-8
    chunk = _raw_chunk(event)
    for choice in chunk.choices:
        for key, value in choice.items():
            if key not in _CARRIED or len(value) <= _SHORT_BYTES:
                choice[key] = decoded(value)
    return chunk


def head_of(event: bytes) -> Json:
    """Return the fields of a chunk beside its choices, its usage and the prompt."""
    return {key: decoded(value) for key, value in fields_of(event).items() if key not in _BESIDE_HEAD}


class Scores:
    """The log-probs of a sample: those of its only chunk as they came, or the lists of several chunks joined."""

    def __init__(self) -> None:
        self._only: Raw | None = None
        self._lists: dict[str, bytearray] = {}
        """The items of each list, without brackets: few large buffers, since small objects leave holes in memory."""

    def add(self, scores: Any) -> None:
        """Take the log-probs of a chunk."""
        scores = scores if isinstance(scores, Raw) else Raw(encoded(scores))
        if self._only is None and not self._lists:
            self._only = scores
            return
        self._take_apart()
        self._extend(_lists(scores))

    def join(self, rest: "Scores") -> None:
        """Take those of the rest of a sample."""
        if self._only is None and not self._lists:
            self._only, self._lists = rest._only, rest._lists
        elif rest._only or rest._lists:
            self._take_apart()
            rest._take_apart()
            self._extend(rest._lists)

    def trim(self, length: int) -> None:
        """Drop those after so many tokens."""
        kept = {key: values[:length] for key, values in opened(self.value() or {}).items() if values is not None}
        self._only, self._lists = (Raw(encoded(kept)) if kept else None), {}

    def value(self) -> Raw | dict[str, Any] | None:
        """The field of a choice."""
        if not self._lists:
            return self._only
        joined: dict[str, Any] = {key: Raw(b"[" + items + b"]") for key, items in self._lists.items()}
        if _OFFSETS in joined:  # each chunk counts from its own start, or from the text before, by the kind of engine
            names = decoded(joined["tokens"])
            joined[_OFFSETS] = list(accumulate(map(len, names[:-1]), initial=0))[: len(names)]
        return joined

    def _take_apart(self) -> None:
        if self._only is not None:
            self._lists, self._only = _lists(self._only), None

    def _extend(self, more: dict[str, bytearray]) -> None:
        for key, items in more.items():
            so_far = self._lists.setdefault(key, bytearray())
            if so_far and items:
                so_far += b","
            so_far += items


def _lists(scores: Raw) -> dict[str, bytearray]:
    # Offsets are counted again.
    return {key: bytearray(b"" if key == _OFFSETS else inside_list(value)) for key, value in fields_of(scores).items()}


class Sample:
    """One sample as one replica makes it, or with its rests: what continues it is a sample too, until it is joined.

    `keeps_content` is False for a stream, whose client has text and log-probs.
    """

    def __init__(self, index: int, *, keeps_content: bool = True) -> None:
        self.index = index
        self.reason: str | None = None
        """How it ended; None while it is open."""
        self.is_cut = False
        """True once its replica has ended it, and it continues elsewhere."""
        self.is_resumed = False
        self.token_ids = array("i")
        self.has_ids = False
        """False where the engine tells no token ids."""
        self.prompt: Raw | list[int] | None = None
        """Token ids of the prompt, as told with this sample."""
        self.num_characters = 0
        self.num_unscored = 0
        """Tokens without a log-prob, where log-probs are asked for; those of a whole reply once it is told."""
        self.spans: list[Json] | None = None
        """Of its tokens by weight version; None before they are known."""
        self.kv_versions: list[int] = []
        self.rest: Sample | None = None
        self._keeps_content = keeps_content
        self._report: list[Json] = []  # the engine's last report of the spans
        self.last: Json = {}
        self._text: list[str] = []
        self.scores = Scores()

    @classmethod
    def of(cls, choice: Json, *, keeps_content: bool = True) -> "Sample":
        """Return a sample that was told whole: by a record, or by a gateway before this one."""
        sample = cls(choice["index"], keeps_content=keeps_content)
        sample.add(choice)
        sample.spans, sample.kv_versions = list(choice["weight_versions"]), choice.get("kv_versions") or []
        sample.is_resumed = MARK in choice
        if sample.reason == CUT_OFF:
            sample.reason = None
        return sample

    @property
    def num_tokens(self) -> int:
        """Tokens of the sample and of the rest that is made of it now."""
        return len(self.token_ids) + (self.rest.num_tokens if self.rest else 0)

    @property
    def is_open(self) -> bool:
        return self.reason is None

    @property
    def shows_prompt(self) -> bool:
        """True where the client of a stream has the prompt's ids, which come with the first tokens."""
        return bool(self.prompt or self.token_ids)

    @property
    def text(self) -> str:
        return "".join(self._text)

    def add(self, choice: Json) -> None:
        """Take a choice of a chunk. Raise one of `NO_JSON` where a value is of another kind; nothing is taken then."""
        token_ids, text = choice.get("token_ids"), choice.get("text")
        new = array("i", token_ids or ())
        length = 0 if text is None else len(text)
        if self._keeps_content:
            if text:
                self._text.append(text + "")
            if scores := choice.get("logprobs"):
                self.scores.add(scores)
        elif scores := choice.get("logprobs"):
            self.num_unscored += num_unscored(scores, len(new))
        self.token_ids += new
        self.has_ids = self.has_ids or token_ids is not None
        self.num_characters += length
        self.prompt = choice.get("prompt_token_ids") or self.prompt
        self._report = choice.get("weight_versions") or self._report
        self.reason = choice.get("finish_reason")
        self.last = choice

    def cut(self) -> None:
        """Take an end by an update as one that continues."""
        if self.reason == ABORT:
            self.reason, self.is_cut = None, True

    def tells(self, fields: Sequence[str]) -> bool:
        """True if its last chunk has one of these fields."""
        return any(self.last.get(field) for field in fields)

    @property
    def has_come(self) -> bool:
        """True once its engine has told anything of it."""
        return bool(self.last)

    def stamp(self, flight: Flight, adapter: Adapter | None, num_counted: int | None = None) -> None:
        """Note the weight versions of its tokens, once: it has ended, or continues elsewhere. `num_counted` is the
        engine's count of tokens without ids."""
        if self.spans is None:
            num = len(self.token_ids) if self.has_ids or not self.last else num_counted
            self.spans, self.kv_versions = stamps(self._report, flight, num, adapter)

    def spans_now(self, flight: Flight, adapter: Adapter | None, before: "Sample | None") -> list[Json]:
        """The spans so far of a sample that goes on, behind those of the sample that it is the rest of."""
        num = len(self.token_ids)
        spans = self.spans or stamps(self._report, flight, num, adapter)[0]
        return spans if before is None else joined_spans(before.spans or [], spans, len(before.token_ids))

    def join(self, rest: "Sample", num_prompt: int) -> None:
        """Take the rest, for which an engine has read the prompt, of so many tokens, and these tokens, or most."""
        read = len(opened(rest.prompt)) - num_prompt if rest.prompt else math.inf
        if rest.token_ids and read < len(self.token_ids):
            self._trim(int(read))
        made = len(self.token_ids)
        self.spans = joined_spans(self.spans or [], rest.spans or [], made)
        self.kv_versions = rest.kv_versions or self.kv_versions
        self.token_ids += rest.token_ids
        self.has_ids = self.has_ids or rest.has_ids
        self._text += rest._text
        self.scores.join(rest.scores)
        self.num_characters += rest.num_characters
        self.num_unscored += rest.num_unscored
        self.prompt = self.prompt if made else rest.prompt or self.prompt
        self.reason, self.last = rest.reason, rest.last
        self.is_resumed, self.is_cut, self.rest = True, rest.is_cut, None

    def _trim(self, length: int) -> None:
        """Drop the last tokens, which are a part of a character. An engine has told it as one of its own."""
        del self.token_ids[length:]
        self._text = [self.text.removesuffix(_HALF)]
        self.scores.trim(length)

    def end(self, reason: str, version: int) -> None:
        """End it while no replica has it; a sample without tokens is of no version that made any."""
        self.reason = reason
        self.spans = self.spans or []
        self.last = self.last | {"finish_reason": reason, "stop_reason": None, "weight_version": version}

    def marks(self, inexact: Sequence[str] | None = None, before: "Sample | None" = None) -> Json:
        """The fields of its last choice that no engine tells. A rest has those of the sample `before` it too."""
        spans, kv_versions, unscored = self.spans or [], self.kv_versions, self.num_unscored
        if before is not None:
            spans = joined_spans(before.spans or [], spans, len(before.token_ids))
            kv_versions, unscored = kv_versions or before.kv_versions, unscored + before.num_unscored
        marks: Json = {"weight_versions": spans}
        if kv_versions:
            marks["kv_versions"] = kv_versions
        if inexact and (before is not None or self.is_resumed):
            marks[MARK] = list(inexact)
        if unscored:
            marks[UNSCORED] = unscored
        return marks

    def told(self, bare: Json, inexact: Sequence[str] | None) -> Json:
        """The sample as a choice of a whole reply; `bare` is one without tokens."""
        scores = self.scores.value()
        told = bare | {"stop_reason": None} | self.last
        told |= {"index": self.index, "logprobs": scores, "finish_reason": self.reason or CUT_OFF}
        if "text" in told:
            told["text"] = self.text
        if self.has_ids:
            told["token_ids"] = self.token_ids.tolist()
        if self.prompt is not None and "prompt_token_ids" in told:
            told["prompt_token_ids"] = self.prompt
        told.pop("delta", None)
        if scores:
            self.num_unscored = num_unscored(scores, len(self.token_ids))
        return told | self.marks(inexact)


class Reply:
    """The samples of one rollout, and what engines tell beside them.

    `prompt` are the token ids of the prompt, where they are known before an engine tells them.
    """

    def __init__(self, prompt: list[int] | None = None, samples: Iterable[Sample] = ()) -> None:
        self.head: Json = {}
        self.samples = list(samples)
        self._prompt = prompt
        self._usage: Json | None = None

    @classmethod
    def of(cls, answer: Json) -> "Reply":
        """Return a reply from a record of a gateway before this one."""
        reply = cls(samples=map(Sample.of, answer.pop("choices")))
        reply.head, reply._usage = answer, answer.pop("usage")
        return reply

    def read(self, event: bytes, samples: Sequence[Sample]) -> Chunk:
        """Take a chunk with choices of these samples: all, or one that stands for the rest of another. Raise one of
        `NO_JSON` where it is none."""
        chunk = read_chunk(event)
        for choice in chunk.choices:
            if (index := choice["index"]) < 0:
                raise IndexError(f"a choice has index {index}")
            samples[index].add(choice)
        if not self.head:
            self.head = head_of(event)
        if chunk.usage and not any(sample.rest for sample in self.samples):  # else it is that of a rest
            self._usage = chunk.usage
        if chunk.prompt_token_ids:
            self._prompt = chunk.prompt_token_ids
        return chunk

    @property
    def prompt(self) -> list[int] | None:
        """The token ids of the prompt; None where no engine has told them."""
        if self._prompt is None:
            self._prompt = opened(next((sample.prompt for sample in self.samples if sample.prompt), None))
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
