"""What engines have made of a rollout: its samples, and what comes with them, whole or streamed, in any dialect.

A reply comes in chunks, so that the tokens are here if the engine dies; a whole reply is one chunk. Token ids and
log-probs, which are most of a reply, are joined as their engines wrote them.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from engines.chunks import Choice, Chunk
from engines.engine import Json
from engines.raw_json import decoded, encoded, list_of, opened
from engines.reading.joining import joined
from gateway.dialects.resumption.features import MARK
from gateway.dialects.spans import UNSCORED, joined_spans, stamps
from gateway.fleet.adapters import Adapter
from gateway.fleet.replica import Flight, Replica

CUT_OFF = "cut off"
"""The finish_reason of a choice that continues. No client sees it."""
ABORT = "abort"

_NO_PART = Choice(0)
_IDS = "token_ids"
_PROMPT = "prompt_token_ids"
_TOKENS_SCORES = "token_logprobs"
_HALF = "\N{REPLACEMENT CHARACTER}"


class Source(NamedTuple):
    """The replica that makes a sample, the record of its flight there, and the adapter that it is made with."""

    replica: Replica
    flight: Flight
    adapter: Adapter | None


class Kept(NamedTuple):
    """What stays of a sample where the rest that a replica makes of it counts no more."""

    num_made: int
    num_parts: int
    num_characters: int
    num_unscored: int
    shows_prompt: bool
    """True where the client of a stream has the prompt's ids, which come with the first tokens."""
    spans: list[Json] | None
    kv_versions: list[int]


_NOTHING = Kept(0, 0, 0, 0, shows_prompt=False, spans=None, kv_versions=[])


class Sample:
    """One sample, made by one replica, or in parts by several: what is kept of it, and what a replica adds now.

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
        self.kept = _NOTHING
        self.num_made = 0
        """Tokens."""
        self.num_read: float = math.inf
        """The tokens that the engine of a rest has read, if it has left some out."""
        self.num_voids = 0
        """How often tokens that it had have become void."""
        self.has_ids = False
        """False where the engine tells no token ids."""
        self.prompt: bytes | None = None
        """Token ids of the prompt, as told with this sample."""
        self.num_characters = 0
        self.num_unscored = 0
        """Tokens without a log-prob, where log-probs are asked for."""
        self.spans: list[Json] | None = None
        """Of its tokens by weight version; None before they are known."""
        self.kv_versions: list[int] = []
        self.parts: list[Choice] = []
        """What came of it, as far as it is kept."""
        self._keeps_content, self._scores_alone = keeps_content, scores_alone
        self._report: list[Json] = []  # the engine's last report of the spans
        self._last: Choice | None = None  # its last choice
        self._end: Json = {}

    @classmethod
    def of(cls, told: Json) -> "Sample":
        """Return a sample that was told whole."""
        sample = cls(told["index"])
        sample.restore(told)
        return sample

    @property
    def whole(self) -> Choice:
        """All that came of it as one choice."""
        return joined(self.parts) if self.parts else _NO_PART

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = decoded(b"[" + b",".join(part.token_ids for part in self.parts if part.token_ids) + b"]")
        return ids

    @property
    def num_new(self) -> int:
        """Tokens beyond those that are kept."""
        return self.num_made - self.kept.num_made

    @property
    def is_open(self) -> bool:
        return self.reason is None

    @property
    def has_come(self) -> bool:
        """True once the engine that makes it now has told anything of it."""
        return self._last is not None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if part.text)

    @property
    def last(self) -> Json:
        """The fields of its last choice beside text and lists, as it came; {} before any has come."""
        last = self._last
        if last is None:
            return self._end
        spans = {} if last.weight_versions is None else {"weight_versions": last.weight_versions}
        return {**last.others, "finish_reason": last.finish_reason, **spans, **self._end}

    def add(self, choice: Choice) -> None:
        """Take a choice of a chunk."""
        if choice.token_ids and self.num_read < self.kept.num_made == self.num_made:
            self._trim(int(self.num_read))
        self.has_ids = self.has_ids or choice.token_ids is not None
        self.num_made += choice.num_tokens
        self.num_unscored += choice.num_unscored
        if choice.text:
            self.num_characters += len(choice.text)
        self.parts.append(self._kept_of(choice))
        if choice.prompt_token_ids is not None and not self.kept.num_made:
            self.prompt = choice.prompt_token_ids
        if choice.weight_versions:
            self._report = choice.weight_versions
        if self._last is not None:
            self._last.written = b"{}"  # nobody asks for what the last has alone
        self.reason = choice.finish_reason
        self._last = choice

    def _kept_of(self, choice: Choice) -> Choice:
        """What is kept of a choice."""
        if self._keeps_content and not self._scores_alone:
            return choice
        kept = Choice(choice.index, token_ids=choice.token_ids, num_tokens=choice.num_tokens)
        if self._keeps_content:
            scores = (choice.logprobs or {}).get(_TOKENS_SCORES)
            kept.text, kept.logprobs = choice.text, None if scores is None else {_TOKENS_SCORES: scores}
        return kept

    def add_told(self, told: Json) -> None:
        """Take a choice that was told to a client."""
        self.add(*Chunk.read(encoded({"choices": [told]})).choices)

    def restore(self, told: Json) -> None:
        """Take what a record or a reply has of it; `told` has the spans of all its tokens."""
        self.add_told(told)
        self.spans, self.kv_versions = list(told["weight_versions"]), told.get("kv_versions") or []
        self.is_resumed = MARK in told
        if self.reason == CUT_OFF:
            self.reason = None

    def cut(self) -> None:
        """Take an end by an update as one that continues."""
        if self.reason == ABORT:
            self.reason, self.is_cut = None, True

    def tells(self, fields: Sequence[str]) -> bool:
        """True if its last choice has one of these fields."""
        last = self.last
        return any(opened(last.get(field)) for field in fields)

    # Parts

    def keep(self) -> None:
        """Keep all that it has: what comes from now on is its rest, which another replica makes."""
        shows_prompt = self.num_made > 0 or self.prompt is not None
        self.kept = Kept(
            self.num_made, len(self.parts), self.num_characters, self.num_unscored, shows_prompt,
            self.kept.spans if self.spans is None else self.spans, self.kv_versions or self.kept.kv_versions,
        )  # fmt: skip
        self.is_resumed, self._report, self._last, self._end = True, [], None, {}

    def begin(self, source: Source) -> None:
        """Have a replica make it, or its rest."""
        if self.source is not None:
            self.drop()
        self.source, self.spans = source, None

    def drop(self) -> None:
        """Forget what was made beyond what is kept: its replica may hold a known version again before the next attempt
        begins."""
        kept = self.kept
        if self._last is not None:
            del self.parts[kept.num_parts :]
            self.num_voids += 1
        self.num_made, self.num_characters, self.num_unscored = kept.num_made, kept.num_characters, kept.num_unscored
        self.spans, self.kv_versions = kept.spans, kept.kv_versions
        self.source, self.reason, self.is_cut, self.num_read = None, None, False, math.inf
        self._report, self._last, self._end = [], None, {}

    def settle(self) -> None:
        """Take what it has for all that there will be, but no tokens of no known version."""
        if self.is_known:
            self.stamp_now()
        else:
            self.drop()

    def free(self) -> None:
        """Forget its content: the client has it."""
        self.parts = []

    def _trim(self, length: int) -> None:
        """Drop tokens that the engine of a rest has not read: they are a part of a character, which it tells as one of
        its own."""
        whole, self.num_made = self.whole, length
        self.parts = [Choice(self.index, text=self.text.removesuffix(_HALF), token_ids=_first(whole.token_ids, length))]
        if whole.logprobs:
            self.parts[0].logprobs = {key: _first(items, length) for key, items in whole.logprobs.items()}
        self.num_voids += 1
        self.keep()

    # Weight versions

    def stamp(self, num_counted: int | None = None) -> None:
        """Note the weight versions of its tokens, once: it has ended, or continues elsewhere. `num_counted` is the
        engine's count of tokens without ids."""
        if self.spans is None:
            is_counted = self.has_ids or self._last is None
            self.spans, self.kv_versions = self.stamps_of(self.num_made if is_counted else num_counted)

    def stamp_now(self) -> None:
        """Note the versions of its tokens, which are known, before its replica has ended all of the others."""
        self.spans, self.kv_versions = self.stamps_of(self.num_made)

    def stamps_of(self, num_tokens: int | None) -> tuple[list[Json], list[int]]:
        """The versions of so many tokens, and of the KV under them."""
        if self.spans is not None:
            return self.spans, self.kv_versions
        assert self.source is not None
        num_new = None if num_tokens is None else num_tokens - self.kept.num_made
        spans, kv_versions = stamps(self._report, self.source.flight, num_new, self.source.adapter)
        if self.kept.spans is not None:
            spans = joined_spans(self.kept.spans, spans, self.kept.num_made)
        return spans, kv_versions or self.kept.kv_versions

    @property
    def is_known(self) -> bool:
        """True where the weight versions of its tokens are known: no update overwrites its replica."""
        return self.spans is not None or (self.source is not None and self.source.replica.weight_version is not None)

    @property
    def num_bytes(self) -> int:
        """Size of its tokens and log-probs."""
        return sum(
            len(items or b"") for part in self.parts for items in (part.token_ids, *(part.logprobs or {}).values())
        )

    # Reports

    def end(self, reason: str, version: int) -> None:
        """End it while no replica has it; a sample without tokens is of no version that made any."""
        self.reason = reason
        if self.spans is None:
            self.spans, self.kv_versions = self.kept.spans or [], self.kept.kv_versions
        self._end = {"finish_reason": reason, "stop_reason": None, "weight_version": version}

    def marks(self, inexact: Sequence[str] | None = None) -> Json:
        """The fields of its last choice that no engine tells; `inexact` are the fields with which its rest is not as it
        would have been."""
        marks: Json = {"weight_versions": self.spans or []}
        if self.kv_versions:
            marks["kv_versions"] = self.kv_versions
        if inexact and self.is_resumed:
            marks[MARK] = list(inexact)
        if self.num_unscored:
            marks[UNSCORED] = self.num_unscored
        return marks

    def told(self, bare: Json, inexact: Sequence[str] | None = None) -> Json:
        """The sample as a choice of a whole reply; `bare` is one without tokens."""
        whole = self.whole
        told = self._beside_lists(whole, bare, inexact)
        told["logprobs"] = whole.scores
        if self.has_ids:
            told[_IDS] = list_of(whole.token_ids or b"")
        if self.prompt is not None and _PROMPT in told:
            told[_PROMPT] = list_of(self.prompt)
        return told

    def written(self, index: int, bare: Json, inexact: Sequence[str] | None, *, shows_ids: bool) -> bytes:
        """As `told`, in JSON, as choice `index`; its token ids and those of its prompt are null without `shows_ids`."""
        whole = self.whole
        told = self._beside_lists(whole, bare, inexact) | {"index": index}
        pieces = list[bytes]()
        for key, items in ((_IDS, whole.token_ids), (_PROMPT, self.prompt)):
            other = told.pop(key, None)
            pieces += _member(key, items, other) if shows_ids else _member(key, None)
        told.pop("logprobs", None)
        if whole.logprobs is None:
            pieces += _member("logprobs", None)
        else:
            scores = list[bytes]()
            for key, items in whole.logprobs.items():
                scores += _member(key, items)
            pieces += [b',"logprobs":{', *scores, b"}"]
            pieces[-len(scores) - 1] = pieces[-len(scores) - 1][1:]  # without a comma
        return b"".join([encoded(told)[:-1], *pieces, b"}"])

    def _beside_lists(self, whole: Choice, bare: Json, inexact: Sequence[str] | None) -> Json:
        """The choice with its text, and with lists as its last choice or `bare` has them."""
        told = {**bare, "stop_reason": None, **self.last}
        told |= {"index": self.index, "finish_reason": self.reason or CUT_OFF}
        if "text" in told or whole.text is not None:
            told["text"] = whole.text or ""
        told.pop("delta", None)
        return told | self.marks(inexact)


def _first(items: bytes | None, length: int) -> bytes | None:
    """The first items of a list."""
    return None if items is None else encoded(decoded(b"[" + items + b"]")[:length])[1:-1]


def _member(key: str, items: bytes | None, other: Any = None) -> list[bytes]:
    """A member of an object in JSON, after others: the list of these items, or another value."""
    name = b',"%b":' % key.encode()
    return [name, encoded(other)] if items is None else [name, b"[", items, b"]"]


class Reply:
    """The samples of one rollout, and what engines tell beside them.

    `prompt` are the token ids of the prompt, where they are known before an engine tells them.
    """

    def __init__(self, prompt: list[int] | None = None, samples: Iterable[Sample] = ()) -> None:
        self.head: Json = {}
        self.samples = list(samples)
        self._prompt = prompt
        self._usage: Json | None = None

    def take(self, chunk: Chunk, samples: Sequence[Sample]) -> None:
        """Take a chunk with choices of these samples: all, or one that continues. Raise one of `NO_JSON` where it has
        others, or lists of another kind."""
        for choice in chunk.choices:
            samples[choice.index].add(choice)
        if not self.head:
            self.head = chunk.head
        if chunk.usage and not samples[0].is_resumed:  # else it is that of a rest
            self._usage = chunk.usage
        if chunk.prompt_token_ids:
            self._prompt = chunk.prompt_token_ids

    @property
    def prompt(self) -> list[int] | None:
        """The token ids of the prompt; None where no engine has told them."""
        if self._prompt is None:
            told = [sample.prompt for sample in self.samples if sample.prompt is not None]
            self._prompt = decoded(b"[" + told[0] + b"]") if told else None
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
        usage, made = self._usage or {}, 0
        is_told = usage.get("completion_tokens") is not None
        for sample in self.samples:
            made += sample.num_made
            is_told = is_told and not sample.is_resumed
        if is_told:
            return usage
        read = usage.get("prompt_tokens") or len(self.prompt or ())
        return {**usage, "prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
