"""What engines have made of a rollout: its samples, and what comes with them, whole or streamed, in any dialect.

A reply comes in chunks, so that the tokens are here if the engine dies; a whole reply is one chunk. Token ids and
log-probs, which are most of a reply, are joined as their engines wrote them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from msgspec import Raw

from engines.chunks import OFFSETS, Choice, Chunk, joined, offsets_of
from engines.engine import Json
from engines.raw_json import EMPTY, decoded, encoded, joined_lists, opened
from engines.weight_label import WeightLabel
from gateway.dialects.resumption import MARK
from gateway.fleet.adapters import Adapter
from gateway.fleet.replica import Flight, Replica

CUT_OFF = "cut off"
"""The finish_reason of a choice that continues. No client sees it."""
ABORT = "abort"
UNSCORED = "missing_logprobs"
"""The field of a choice with the number of its tokens for which the engine gave no finite log-prob; absent if none."""

_LIMITS = ("start", "end")
_version_of = lru_cache(64)(lambda label: WeightLabel.read(label).version)
_NO_PART = Choice(0)
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
    kv_versions: Sequence[int]


_NOTHING = Kept(0, 0, 0, 0, shows_prompt=False, spans=None, kv_versions=[])


class Sample:
    """One sample, made by one replica, or in parts by several: what is kept of it, and what a replica adds now.

    `keeps_content` is False for a stream, whose client has text and log-probs.
    """

    source: Source | None = None
    """None where nobody makes it, or what was made counts no more."""
    reason: str | None = None
    """How it ended; None while it is open."""
    is_resumed = False
    inexact: Sequence[str] = ()
    """The fields with which its rest is not as it would have been, once it is resumed."""
    kept = _NOTHING
    num_made = 0
    """Tokens."""
    num_read: float = math.inf
    """The tokens that the engine of a rest has read, if it has left some out."""
    num_voids = 0
    """How often tokens that it had have become void."""
    has_ids = False
    """False where the engine tells no token ids."""
    prompt: bytes | None = None
    """Token ids of the prompt, as told with this sample."""
    num_characters = 0
    """Of a stream."""
    num_unscored = 0
    """Tokens without a log-prob, where log-probs are asked for."""
    spans: list[Json] | None = None
    """Of its tokens by weight version; None before they are known."""
    kv_versions: Sequence[int] = ()
    _report: Sequence[Json] = ()  # the engine's last report of the spans
    _last: Choice | None = None  # its last choice
    _end: Json | None = None

    def __init__(self, index: int, *, keeps_content: bool = True) -> None:
        self.index = index
        self.parts: list[Choice] = []
        """What came of it, as far as it is kept."""
        self._keeps_content = keeps_content

    @classmethod
    def of(cls, told: Json) -> "Sample":
        """Return a sample as a reply has it."""
        sample, kv_versions = cls(told["index"]), told.get("kv_versions") or []
        sample.restore(_choices_of(told), list(told["weight_versions"]), kv_versions, told.get(MARK))
        sample.reason = None if told["finish_reason"] == CUT_OFF else told["finish_reason"]
        return sample

    @property
    def whole(self) -> Choice:
        """All that came of it as one choice."""
        whole = joined(self.parts) if self.parts else _NO_PART
        if self.is_resumed and whole.logprobs and OFFSETS in whole.logprobs:  # a rest counts from its own start
            whole.logprobs[OFFSETS], _ = offsets_of(whole.logprobs["tokens"])
        return whole

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = decoded(joined_lists(part.token_ids for part in self.parts if part.token_ids))
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
            return self._end or {}
        spans = {} if last.weight_versions is None else {"weight_versions": last.weight_versions}
        return {**last.others, "finish_reason": last.finish_reason, **spans, **(self._end or {})}

    def add(self, choice: Choice) -> None:
        """Take a choice of a chunk. What an engine aborts of itself, as it ends, has not ended."""
        if choice.finish_reason == ABORT and self.source is not None and not self.source.flight.may_abort:
            choice.finish_reason = None
        if self.is_resumed and self.num_read < self.kept.num_made == self.num_made and choice.num_tokens:
            self._trim(int(self.num_read))
        if choice.token_ids is not None:
            self.has_ids = True
        self.num_made += choice.num_tokens
        self.num_unscored += choice.num_unscored
        self.parts.append(choice if self._keeps_content else self._kept_of(choice))
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
        self.num_characters += len(choice.text or "")
        kept = Choice(choice.index, token_ids=choice.token_ids, num_tokens=choice.num_tokens)
        kept.prompt_token_ids = choice.prompt_token_ids
        return kept

    def restore(
        self,
        parts: Iterable[Choice],
        spans: list[Json] | None,
        kv_versions: Sequence[int],
        inexact: Sequence[str] | None,
        end: Json | None = None,
    ) -> None:
        """Take more that was made before. `spans` and `kv_versions` are of all its tokens, None where the last span
        goes on; `inexact` is None unless it was resumed, `end` are the fields with which it has ended."""
        for part in parts:
            self.add(part)
        if spans is not None:
            self.spans, self.kv_versions = spans, kv_versions
            self.is_resumed, self.inexact = inexact is not None, inexact or ()
        elif self.spans and self.spans[-1]["end"] is not None:
            self.spans[-1]["end"] = self.num_made
        self.reason, self._end = (end or {}).get("finish_reason"), end

    def tells(self, fields: Sequence[str]) -> bool:
        """True if its last choice has one of these fields."""
        last = self.last
        return any(opened(last.get(field)) for field in fields)

    # Parts

    def keep(self, inexact: Sequence[str] = ()) -> None:
        """Keep all that it has: what comes from now on is its rest, which another replica makes. `inexact` are the
        fields with which the rest is not as it would have been."""
        shows_prompt = self.num_made > 0 or self.prompt is not None
        self.kept = Kept(
            self.num_made, len(self.parts), self.num_characters, self.num_unscored, shows_prompt,
            self.kept.spans if self.spans is None else self.spans, self.kv_versions or self.kept.kv_versions,
        )  # fmt: skip
        self.is_resumed, self.inexact = True, self.inexact or inexact
        self._report, self._last, self._end = (), None, None

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
        self.source, self.reason, self.num_read = None, None, math.inf
        self._report, self._last, self._end = (), None, None

    def settle(self) -> None:
        """Take what it has for all that there will be, but no tokens of no known version."""
        if self.is_known:
            self.stamp(self.num_made)
        else:
            self.drop()

    def _trim(self, length: int) -> None:
        """Drop tokens that the engine of a rest has not read: they are a part of a character, which it tells as one of
        its own."""
        whole, self.num_made = self.whole, length
        ids = _first(whole.token_ids or EMPTY, length)
        self.parts = [Choice(self.index, text=self.text.removesuffix(_HALF), token_ids=ids)]
        if whole.logprobs:
            self.parts[0].logprobs = {key: _first(one, length) for key, one in whole.logprobs.items()}
        self.num_voids += 1
        self.keep()

    # Weight versions

    def stamp(self, num_counted: int | None = None) -> None:
        """Note the weight versions of its tokens, once: they are known, as it has ended or continues elsewhere.
        `num_counted` is the engine's count of tokens without ids."""
        if self.spans is None:
            is_counted = self.has_ids or self._last is None
            self.spans, self.kv_versions = self.stamps_of(self.num_made if is_counted else num_counted)

    def stamps_of(self, num_tokens: int | None) -> tuple[list[Json], Sequence[int]]:
        """The versions of so many tokens, and of the KV under them."""
        if self.spans is not None:
            return self.spans, self.kv_versions
        source, kept = self.source, self.kept
        assert source is not None
        if not self.is_resumed:
            return stamps(self._report, source.flight, num_tokens, source.adapter)
        num_new = num_tokens and num_tokens - kept.num_made
        spans, kv_versions = stamps(self._report, source.flight, num_new, source.adapter)
        if kept.spans is not None:
            spans = joined_spans(kept.spans, spans, kept.num_made)
        return spans, kv_versions or kept.kv_versions

    @property
    def basis(self) -> object:
        """What the spans of its tokens follow from, but for the end of the last; None where they are known."""
        if self.spans is not None or self.source is None:
            return None
        report = self._report
        return self.source, len(self.source.flight.versions), report, not report or report[-1]["start"] < self.num_made

    @property
    def is_known(self) -> bool:
        """True where the weight versions of its tokens are known: no update overwrites its replica."""
        return self.spans is not None or (self.source is not None and self.source.replica.weight_version is not None)

    # Reports

    def end(self, reason: str, version: int) -> None:
        """End it while no replica has it; a sample without tokens is of no version that made any."""
        self.reason = reason
        if self.spans is None:
            self.spans, self.kv_versions = self.kept.spans or [], self.kept.kv_versions
        self._end = {"finish_reason": reason, "stop_reason": None, "weight_version": version}

    def marks(self) -> Json:
        """The fields of its last choice that no engine tells."""
        marks: Json = {"weight_versions": self.spans or []}
        if self.kv_versions:
            marks["kv_versions"] = self.kv_versions
        if self.inexact:
            marks[MARK] = self.inexact
        if self.num_unscored:
            marks[UNSCORED] = self.num_unscored
        return marks

    def told(self, bare: Json) -> Json:
        """The sample as a choice of a whole reply, its lists as JSON; `bare` is one without tokens."""
        whole, others = self.whole, {} if self._last is None else self._last.others
        told = {**bare, "stop_reason": None, **others, **(self._end or {}), **self.marks(), "logprobs": whole.scores}
        told["finish_reason"], told["index"] = self.reason or CUT_OFF, self.index
        if "text" in told or whole.text is not None:
            told["text"] = whole.text or ""
        if self.has_ids:
            told["token_ids"] = Raw(whole.token_ids or EMPTY)
        if self.prompt is not None and "prompt_token_ids" in told:
            told["prompt_token_ids"] = Raw(self.prompt)
        told.pop("delta", None)
        return told


def _choices_of(told: Json) -> list[Choice]:
    return Chunk.read(encoded({"choices": [told]})).choices


def _first(items: bytes, length: int) -> bytes:
    """The first items of a list in JSON, which may be null."""
    listed = decoded(items)
    return items if listed is None else encoded(listed[:length])


class Reply:
    """The samples of one rollout, and what engines tell beside them.

    `prompt` are the token ids of the prompt, where they are known before an engine tells them. `heard` is called when
    there may be more of a reply that is not streamed, for its record.
    """

    heard: Callable[[], None] | None = None

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
            self._prompt = decoded(told[0]) if told else None
        return self._prompt

    @property
    def counted(self) -> int | None:
        """The engine's count of tokens; None where it has not come."""
        return (self._usage or {}).get("completion_tokens")

    @property
    def num_unscored(self) -> int:
        """Tokens without a log-prob, where log-probs are asked for."""
        return sum(map(attrgetter("num_unscored"), self.samples))

    @property
    def open(self) -> list[Sample]:
        """The samples that have not ended."""
        return [sample for sample in self.samples if sample.reason is None]

    @property
    def usage(self) -> Json:
        """The count of the engine; where samples continued, or it has not come, of the tokens that are here."""
        usage = self._usage or {}
        if self.counted is not None and not any(map(attrgetter("is_resumed"), self.samples)):
            return usage
        made = sum(sample.num_made for sample in self.samples)
        read = usage.get("prompt_tokens") or len(self.prompt or ())
        return {**usage, "prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def stamps(
    report: Sequence[Json], flight: Flight, num_tokens: int | None, adapter: Adapter | None = None
) -> tuple[list[Json], list[int]]:
    """The weight versions of a sample's tokens, and those of its KV. The engine's own report comes first.

    An engine reports a version with its first token, so the tokens after a report are of the report's last version. Its
    label changes at a commit, and its weights do not.

    Without a report a request that met one version has one span. A request that met several has them all, without
    limits: tokens arrive late, and the engine alone knows when it made them. `num_tokens` is None if it is unknown.
    Call it after `Replica.vouched`.
    """
    spans: list[Json] = []
    for span in report:
        if num_tokens is not None and span["start"] >= num_tokens:
            break
        version = _version_of(span["version"])
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = span["end"]
        else:
            spans.append({**span, "version": version})
    versions = flight.versions
    if spans:
        spans[-1]["end"] = spans[-1]["end"] if num_tokens is None else num_tokens
    elif len(versions) == 1:
        spans = [{"version": versions[0], "start": 0, "end": num_tokens}]
    elif num_tokens != 0:
        spans = [{"version": version, "start": None, "end": None} for version in versions]
    kv_versions = flight.kv_versions(spans)
    if adapter is not None:  # its tokens are of its version; a span keeps the model's own
        for span in spans:
            span |= {"version": adapter.version, "base_version": span["version"], "adapter": adapter.name}
    return spans, kv_versions


def joined_spans(first: list[Json], rest: list[Json], kept: int) -> list[Json]:
    """Spans over both parts: the first as far as `kept`, then the rest. A version without limits is named once."""
    spans: list[Json] = []
    cut = ({**span, "end": None if span["end"] is None else min(span["end"], kept)} for span in first if kept)
    moved = ({**span, **{key: _plus(span[key], kept) for key in _LIMITS}} for span in rest)
    for span in (*cut, *moved):
        if span["end"] is not None and span["start"] >= span["end"]:
            continue
        if spans and _follows(span, spans[-1]):
            spans[-1]["end"] = span["end"]
        elif span not in spans:
            spans.append(span)
    return spans


def _follows(span: Json, before: Json) -> bool:
    """True if the same weights made both spans, one right after the other."""
    is_next = span["start"] is not None and span["start"] == before["end"]
    return is_next and before == {**span, **{key: before[key] for key in _LIMITS}}


def _plus(limit: int | None, tokens: int) -> int | None:
    return None if limit is None else limit + tokens
