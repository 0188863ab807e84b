"""What a record gets of samples as they are made, so that a later gateway goes on with them."""

from collections.abc import Sequence

import msgspec

from engines.chunks import Choice
from engines.engine import Json
from engines.raw_json import decoded, encoded
from gateway.dialects.runner import Ask
from gateway.dialects.sample import Reply, Sample


class Growth(msgspec.Struct, array_like=True, gc=False):
    """What a sample has got since the last one, as its reader told it; all that it has, where it begins (again).
    `spans` and `kv_versions` are of all its tokens; None where the last span goes on. `inexact` is None unless it was
    resumed. `end` is JSON of the fields with which it has ended."""

    prompt: int
    sample: int
    begins: bool
    parts: list[Choice]
    spans: list[Json] | None = None
    kv_versions: Sequence[int] = ()
    inexact: Sequence[str] | None = None
    end: bytes = b""


class Recorded:
    """How much of a sample the record has."""

    def __init__(self, sample: Sample, prompt: int = 0) -> None:
        self.sample = sample
        self._prompt = prompt
        self._num_parts = 0
        self._num_voids = sample.num_voids
        self._basis: object = None  # of the spans that the record has
        self.has_end = False
        """True once the sample has ended, and the record has that."""

    def growth(self) -> Growth | None:
        """Return what the sample has got since the last call; all of it where a part that was returned has become void.
        None where there is nothing, or of no known version."""
        sample, is_ended = self.sample, self.sample.reason is not None
        if sample.num_voids != self._num_voids:
            self._num_parts, self._num_voids, self.has_end = 0, sample.num_voids, False
        ends = is_ended and not self.has_end and (sample.has_ids or sample.spans is not None)
        parts, begins = sample.parts[self._num_parts :], not self._num_parts
        if not (parts or ends) or not sample.is_known:
            return None
        self.note()
        step, basis = Growth(self._prompt, sample.index, begins, parts), sample.basis
        if begins or ends or basis is None or basis != self._basis:
            step.spans, step.kv_versions = sample.stamps_of(sample.num_made)
            step.inexact = sample.inexact if sample.is_resumed else None
            self._basis = basis
        if is_ended:
            step.end = encoded(sample.last)
        return step

    def note(self) -> None:
        """The record has all of it."""
        self._num_parts, self.has_end = len(self.sample.parts), self.sample.reason is not None


class PromptRecord:
    """The samples of one prompt as they are made, and how much of them the record has."""

    def __init__(self, prompt: int, given: list[int] | None) -> None:
        """`given` are the token ids of the prompt, where its client has sent them."""
        self.reply = Reply(given)
        self._prompt = prompt
        self._ask: Ask | None = None
        self._is_given = given is not None
        self._recorded: dict[int, Recorded] = {}

    @property
    def is_recorded(self) -> bool:
        """True once all samples have ended, and the record has them whole."""
        return bool(self.reply.samples) and all(self._of(sample).has_end for sample in self.reply.samples)

    def _of(self, sample: Sample) -> Recorded:
        """What the record has of a sample, which may take the place of another."""
        found = self._recorded.get(sample.index)
        if found is None or found.sample is not sample:
            found = self._recorded[sample.index] = Recorded(sample, self._prompt)
        return found

    def begin(self, ask: Ask) -> None:
        """Have what was made before continue as `ask` says; all that is open begins again where it may not continue."""
        self._ask = ask
        if self.reply.open and not ask.resumes:
            self.reply = Reply(self.reply.prompt)
        if begun := {sample.index: sample for sample in self.reply.samples}:  # else all are asked for at once
            self.reply.samples = [begun.get(index) or Sample(index) for index in range(ask.rollout.n)]

    def growth(self) -> list[Growth]:
        """Return what came since the last call, but no tokens whose version an update leaves open, and none before the
        end where they would not continue."""
        if self._ask and not self._ask.resumes and self.reply.open:
            return []
        steps = [step for sample in self.reply.samples if (step := self._of(sample).growth()) is not None]
        if self._is_given:
            for step in steps:
                for part in step.parts:
                    part.prompt_token_ids = None  # the head has it
        return steps

    def restore(self, step: Growth) -> None:
        """Take a step of a gateway before this one."""
        if step.begins:
            others = [sample for sample in self.reply.samples if sample.index != step.sample]
            self.reply = Reply(self.reply.prompt, [*others, Sample(step.sample)])
        (sample,) = [one for one in self.reply.samples if one.index == step.sample]
        sample.restore(step.parts, step.spans, step.kv_versions, step.inexact, decoded(step.end) if step.end else None)
        self._of(sample).note()
