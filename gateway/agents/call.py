"""One call of a session: its prompt after its parent's, what was sampled, and its end, as steps that the ledger has."""

import asyncio
import math
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from engines.engine import Json
from engines.raw_json import decoded
from gateway.agents.history import End
from gateway.dialects.sample import Reply
from gateway.dialects.submissions.group_record import Recorded


class Began(msgspec.Struct, tag="began", array_like=True, frozen=True):
    """A call before it is generated, with the fields of its report.

    `prompt_token_ids` are those after the ids of its parent, in int32, of `prompt_tokens` in all; none where no engine
    renders it. `sampling` and `tools`, which roots alone have, are JSON.
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
    tools: bytes


class Grown(msgspec.Struct, tag="grown", array_like=True, frozen=True):
    """Tokens from `start` on, in int32, with log-probs in float32, and the versions of all tokens so far."""

    call: int
    start: int
    token_ids: bytes
    logprobs: bytes
    weight_versions: list[Any]


class Ended(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """The end of a call, with the fields of its report. `num_prompt` and `num_sampled` are an engine's counts, where it
    gave no ids too; the history reads `digest` and `end`."""

    call: int
    ended: float | None
    state: str
    mask: str | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: Json | None = None
    num_prompt: int = 0
    num_sampled: int = 0
    digest: bytes = b""
    end: End | None = None


Step = Began | Grown | Ended

_REPORTED = ("ended", "state", "mask", "finish_reason", "stop_reason", "error")

_OBJECT_BYTES = 2000
"""About what a call takes in memory beside its tokens."""


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None = None


_entries = msgspec.json.Decoder(list[_Entry]).decode


class Call:
    """A call, open until `ended` is set."""

    def __init__(self, began: Began) -> None:
        self.began = began
        self.token_ids = array("i")
        self.logprobs = array("f")
        self.weight_versions: list[Json] = []
        self.ended: Ended | None = None
        self.reward: float | None = None
        self.reply: Reply | None = None
        """What engines have made of it, while it is open."""
        self.task: asyncio.Task[Any] | None = None
        """Has it generated and parsed."""
        self.cut_for = ""
        """The mask with which its session ends it."""
        self._recorded: Recorded | None = None

    @property
    def mask(self) -> str | None:
        return self.ended.mask if self.ended else None

    @property
    def num_sampled(self) -> int:
        return max(len(self.token_ids), self.ended.num_sampled if self.ended else 0)

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        kept = (self.began.prompt_token_ids, self.began.sampling, self.began.tools)
        return _OBJECT_BYTES + sum(map(len, kept)) + 8 * len(self.token_ids)

    @property
    def is_made(self) -> bool:
        """True once all of its tokens are there."""
        return self.reply is not None and bool(self.reply.samples) and not self.reply.open

    @property
    def is_scored(self) -> bool:
        """False where engines gave no log-prob for any token."""
        return not self.token_ids or not all(map(math.isnan, self.logprobs))

    def cut(self, mask: str) -> None:
        """End it with the tokens that it has."""
        if self.task is not None and not self.cut_for:
            self.cut_for = mask
            self.task.cancel()

    def settle(self) -> None:
        """Take what there is for all that there will be."""
        for sample in self.reply.samples if self.reply else ():
            sample.settle()

    def grow(self) -> Iterator[Grown]:
        """Take the tokens of known versions that have come since the last call, if any have, and yield them."""
        for sample in self.reply.samples if self.reply else ():
            if self._recorded is None or self._recorded.sample is not sample:
                self._recorded = Recorded(sample)
            if (grown := self._recorded.growth()) is not None:
                yield self._grown(*grown)

    def _grown(self, choice: Json, is_all: bool) -> Grown:
        ids = array("i", decoded(choice["token_ids"] or Raw(b"[]")))
        scores = _scores(choice["logprobs"] or {}, len(ids))
        start = 0 if is_all else len(self.token_ids)
        step = Grown(self.began.call, start, ids.tobytes(), scores.tobytes(), choice["weight_versions"])
        self.take(step)
        return step

    def take(self, step: Step) -> None:
        """Take a step, as it happens or from a gateway before this one."""
        match step:
            case Grown(_, start, token_ids, logprobs, versions):
                del self.token_ids[start:], self.logprobs[start:]
                self.token_ids.frombytes(token_ids)
                self.logprobs.frombytes(logprobs)
                self.weight_versions = versions
            case Ended():
                self.ended = step
                self.reply = self.task = self._recorded = None

    def steps(self) -> Iterator[Step]:
        """Yield all that there is, for a new record."""
        yield self.began
        if self.token_ids:
            tokens = self.token_ids.tobytes(), self.logprobs.tobytes()
            yield Grown(self.began.call, 0, *tokens, self.weight_versions)
        if self.ended:
            yield self.ended

    def report(self) -> Json:
        """Return the call as readers get it: token ids in int32, log-probs in float32, both little-endian."""
        began = msgspec.structs.asdict(self.began)
        ended = msgspec.structs.asdict(self.ended or Ended(self.began.call, None, "open", None))
        tools = began.pop("tools")
        return {
            "type": "call",
            **began,
            **{name: ended[name] for name in _REPORTED},
            "prompt_tokens": self.began.prompt_tokens or ended["num_prompt"],
            "token_ids": self.token_ids.tobytes(),
            "logprobs": self.logprobs.tobytes() if self.is_scored else None,
            "weight_versions": self.weight_versions,
            "sampling": decoded(self.began.sampling),
            "reward": self.reward,
        } | ({"tools": decoded(tools)} if tools else {})


def _scores(logprobs: dict[str, Raw], number: int) -> "array[float]":
    """Return the log-probs of so many tokens; NaN where an engine gave none."""
    given = [math.nan if one.logprob is None else one.logprob for one in _entries(logprobs.get("content", b"[]"))]
    return array("f", given + [math.nan] * (number - len(given)))
