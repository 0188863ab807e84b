"""One sample of a group as its record has it: tokens as int32, log-probs as float32, both in bytes."""

import math
from array import array
from dataclasses import dataclass, field

import orjson

from engines.engine import Json
from gateway.dialects.raw_json import opened
from gateway.dialects.resumption.features import MARK
from gateway.dialects.runner import SO_FAR
from gateway.dialects.spans import UNSCORED
from gateway.dialects.submissions.frames import Tokens

_OF_THE_END = ("finish_reason", "stop_reason", "weight_versions", "kv_versions")
_ABORT = "abort"


@dataclass(slots=True, eq=False)
class Sample:
    """Grows by the choices of a stream. `end` has the fields of its last choice; None while it is open."""

    index: int
    token_ids: array = field(default_factory=lambda: array("i"))  # type: ignore[type-arg]  # array has no runtime type
    logprobs: array = field(default_factory=lambda: array("f"))  # type: ignore[type-arg]
    spans: list[Json] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    """Fields with which its continuation is not exact."""
    end: Json | None = None
    is_done: bool = False
    """True for a sample that needs no work: delivered before, or by another submission."""
    _text: list[str] = field(default_factory=list)
    _written: tuple[int, int] = (0, 0)  # tokens, and pieces of text, that the ledger has

    @property
    def is_open(self) -> bool:
        return self.end is None and not self.is_done

    @property
    def counts(self) -> bool:
        """True if it ended by itself."""
        return self.end is not None and self.end["finish_reason"] != _ABORT

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def num_bytes(self) -> int:
        return 4 * (len(self.token_ids) + len(self.logprobs))

    def add(self, choice: Json) -> None:
        """Take a choice of a chunk, or of a whole reply."""
        self.token_ids.extend(choice.get("token_ids") or ())
        scores = (opened(choice.get("logprobs")) or {}).get("token_logprobs") or ()
        self.logprobs.extend(math.nan if score is None else score for score in scores)
        if text := choice.get("text"):
            self._text.append(text)
        self.spans = choice.get(SO_FAR) or self.spans
        self.marks = choice.get(MARK) or self.marks
        if choice.get("finish_reason") is not None:
            self.end = {key: choice[key] for key in _OF_THE_END if choice.get(key) is not None}
            self.spans = choice["weight_versions"]

    def grow(self, part: Tokens) -> None:
        """Take tokens from the ledger."""
        self.token_ids.frombytes(part.token_ids)
        self.logprobs.frombytes(part.logprobs)
        self._text.append(part.text)
        stamps = orjson.loads(part.spans)
        self.spans = [stamp for stamp in stamps if MARK not in stamp]
        self.marks = next((stamp[MARK] for stamp in stamps if MARK in stamp), [])
        self._written = len(self.token_ids), len(self._text)

    def growth(self, group: int) -> Tokens | None:
        """Return what came since the last call, as a sample of `group`; None if nothing did."""
        start, words = self._written
        if start == len(self.token_ids):
            return None
        self._written = len(self.token_ids), len(self._text)
        text = "".join(self._text[words:])
        ids, logprobs = self.token_ids[start:].tobytes(), self.logprobs[start:].tobytes()
        stamps = [*self.spans, {MARK: self.marks}] if self.marks else self.spans
        return Tokens(group, self.index, ids, logprobs, text, orjson.dumps(stamps))

    def everything(self, group: int) -> Tokens | None:
        """Return all that there is, as if none had been written."""
        self._written = 0, 0
        return self.growth(group)

    def forget(self) -> None:
        """Drop the tokens: the sample begins again."""
        self.token_ids, self.logprobs = array("i"), array("f")
        self.spans, self.marks, self._text, self._written = [], [], [], (0, 0)

    def deliver(self) -> None:
        """The record has an event with all of it."""
        self.is_done = True
        self.forget()

    def part(self, read: list[int] | str) -> Json:
        """The sample as the first part of its continuation; `read` is the prompt."""
        return {
            "index": self.index,
            "prompt_token_ids": read,
            "token_ids": self.token_ids.tolist(),
            "text": self.text,
            "weight_versions": self.spans,
        }

    def report(self, finish_reason: str | None = None) -> Json:
        """The sample's event; `finish_reason` is that of an open sample."""
        end = self.end or {"finish_reason": finish_reason, "weight_versions": self.spans}
        has_logprobs = len(self.logprobs) == len(self.token_ids) > 0
        unscored = sum(map(math.isnan, self.logprobs)) if has_logprobs else 0
        return {
            "type": "sample",
            "sample": self.index,
            "token_ids": self.token_ids.tobytes(),
            "logprobs": self.logprobs.tobytes() if has_logprobs else None,
            "text": self.text,
            **end,
            **({MARK: self.marks} if self.marks else {}),
            **({UNSCORED: unscored} if unscored else {}),
        }
