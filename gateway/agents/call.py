"""One call of a session: its prompt after its parent's, what was sampled, and its end."""

import asyncio
import math
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec

from engines.engine import Json
from engines.raw_json import EMPTY, decoded
from gateway.agents.history import End
from gateway.dialects.growth import Growth, Recorded
from gateway.dialects.sample import Reply, Sample

_LAST = 8  # ids at the end of a call, which few other calls have there
_OBJECT_BYTES = 2000
"""About what a call takes in memory beside its tokens."""
_OWN = ("num_sampled", "digest")  # no reader gets these


class Facts(msgspec.Struct, tag="call", array_like=True, kw_only=True):
    """A call without its tokens, under the names of its report. It is open while `ended` is None.

    `prompt_token_ids` are those after the ids of its parent, in int32, of `prompt_tokens` in all; none where no engine
    renders it. `sampling` and `tools`, which roots alone have, are JSON. `media` are digests of the contents in the
    whole prompt, in its order. `num_sampled` is the engine's count, where it gave no ids too; the history reads
    `digest`.
    """

    call: int
    parent: int | None
    root_reason: str | None
    retry_of: int | None
    dialect: str
    agent: str | None
    window: str | None
    model: str
    began: float
    prompt_tokens: int
    prompt_token_ids: bytes
    sampling: bytes
    tools: bytes = b""
    media: list[str] = []
    ended: float | None = None
    state: str = "open"
    mask: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: Json | None = None
    reward: float | None = None
    num_sampled: int = 0
    digest: bytes = b""


class Grown(msgspec.Struct, tag="grown", array_like=True, frozen=True):
    """Tokens from `start` on, in int32, with log-probs in float32, and the versions of all tokens so far."""

    call: int
    start: int
    token_ids: bytes
    logprobs: bytes
    weight_versions: list[Any]


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None = None


_entries = msgspec.json.Decoder(list[_Entry]).decode


class Call:
    """A call and its tokens."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.token_ids = array("i")
        self.logprobs = array("f")
        self.weight_versions: list[Json] = []
        self.reply: Reply | None = None
        """What engines have made of it, while it is open."""
        self.task: asyncio.Task[Any] | None = None
        """Has it generated and parsed."""
        self.cut_for = ""
        """The mask with which its session ends it."""
        self._recorded: Recorded | None = None

    @property
    def num_sampled(self) -> int:
        return max(len(self.token_ids), self.facts.num_sampled)

    @property
    def length(self) -> int:
        """The number of all its ids."""
        return self.facts.prompt_tokens + len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Size in memory, without what the engine makes."""
        return _OBJECT_BYTES + sum(map(len, (self.facts.prompt_token_ids, self.facts.sampling, self.facts.tools)))

    @property
    def end(self) -> End | None:
        """What later turns that follow it need; None where none can."""
        if not self.facts.digest or not self.facts.prompt_tokens:
            return None
        last = array("i", self.facts.prompt_token_ids)[-_LAST:] + self.token_ids[-_LAST:]
        how = self.facts.finish_reason or "", self.facts.stop_reason
        return End(*how, self.facts.prompt_tokens, self.length, last[-_LAST:].tolist())

    @property
    def is_scored(self) -> bool:
        """False where engines gave no log-prob for any token."""
        return not self.token_ids or not all(map(math.isnan, self.logprobs))

    def cut(self, mask: str) -> None:
        """End it with the tokens that it has."""
        if self.task is not None and not self.cut_for:
            self.cut_for = mask
            self.task.cancel()

    def grow(self) -> Iterator[Grown]:
        """Take the tokens of known versions that have come since the last call, if any have, and yield them."""
        for sample in self.reply.samples if self.reply else ():
            if self._recorded is None or self._recorded.sample is not sample:
                self._recorded = Recorded(sample)
            if (step := self._recorded.growth()) is not None:
                yield self._grown(sample, step)

    def _grown(self, sample: Sample, step: Growth) -> Grown:
        ids, scores = array("i"), array("f")
        for part in step.parts:
            new = decoded(part.token_ids or EMPTY)
            ids.extend(new)
            scores.extend(_scores(part.logprobs or {}, len(new)))
        start = 0 if step.begins else len(self.token_ids)
        grown = Grown(self.facts.call, start, ids.tobytes(), scores.tobytes(), sample.stamps_of(sample.num_made)[0])
        self.take(grown)
        return grown

    def take(self, step: Grown) -> None:
        """Take tokens, as they come or from a gateway before this one."""
        del self.token_ids[step.start :], self.logprobs[step.start :]
        self.token_ids.frombytes(step.token_ids)
        self.logprobs.frombytes(step.logprobs)
        self.weight_versions = step.weight_versions

    def report(self) -> Json:
        """Return the call as readers get it: token ids in int32, log-probs in float32, both little-endian."""
        facts = msgspec.structs.asdict(self.facts)
        report = {name: value for name, value in facts.items() if value != b"" and name not in _OWN}
        for name in ("sampling", "tools"):
            if name in report:
                report[name] = decoded(report[name])
        return report | {
            "type": "call",
            "prompt_token_ids": self.facts.prompt_token_ids,
            "token_ids": self.token_ids.tobytes(),
            "logprobs": self.logprobs.tobytes() if self.is_scored else None,
            "weight_versions": self.weight_versions,
        }


def _scores(logprobs: dict[str, bytes], number: int) -> "array[float]":
    """Return the log-probs of so many tokens; NaN where an engine gave none."""
    given = [math.nan if one.logprob is None else one.logprob for one in _entries(logprobs.get("content", b"[]"))]
    return array("f", given + [math.nan] * (number - len(given)))
