"""The samples of one group as they are made, and how much of them the ledger has."""

import math
from array import array

from engines.engine import Json
from engines.raw_json import decoded, encoded, opened
from gateway.dialects.runner import Ask
from gateway.dialects.sample import UNSCORED, Reply, Sample
from gateway.dialects.submissions.frames import Growth


class Recorded:
    """How much of a sample the record has."""

    def __init__(self, sample: Sample, group: int = 0) -> None:
        self.sample = sample
        self._group = group
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
        step, basis = Growth(self._group, sample.index, begins, parts), sample.basis
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


class GroupRecord:
    """A prompt of a submission, or of a batch. `done` are the samples that need no more work: others are open, or have
    ended and are part of a reply to come."""

    def __init__(self, group: int, n: int, given: list[int] | None) -> None:
        """`given` is the prompt where its client has sent token ids."""
        self.group = group
        self.done = set[int]()
        self.reply = Reply(given)
        self._ask: Ask | None = None
        self._n = n
        self._is_given = given is not None
        self._recorded: dict[int, Recorded] = {}

    @property
    def open(self) -> list[Sample]:
        """The samples that have not ended, as far as they have begun."""
        return [sample for sample in self.reply.open if sample.index not in self.done]

    @property
    def num_bytes(self) -> int:
        return sum([sample.num_bytes for sample in self.reply.samples])

    @property
    def is_recorded(self) -> bool:
        """True once all samples have ended, and the record has them whole."""
        return bool(self.reply.samples) and all(self._of(sample).has_end for sample in self.reply.samples)

    def _of(self, sample: Sample) -> Recorded:
        """What the record has of a sample, which may take the place of another."""
        found = self._recorded.get(sample.index)
        if found is None or found.sample is not sample:
            found = self._recorded[sample.index] = Recorded(sample, self.group)
        return found

    def begin(self, ask: Ask) -> None:
        """Have what was made before continue as `ask` says; all that is open begins again where it may not continue."""
        self._ask = ask
        if self.reply.open and not ask.resumes:
            self.reply = Reply(self.reply.prompt)
        begun = {sample.index: sample for sample in self.reply.samples if sample.index not in self.done}
        if begun or self.done:  # else all of them are asked for at once
            left = [index for index in range(self._n) if index not in self.done]
            self.reply.samples = [begun.get(i) or Sample(i, scores_alone=ask.is_submitted) for i in left]

    def settle(self) -> None:
        """Take what open samples have for all that there will be."""
        for sample in self.reply.samples:
            sample.settle()

    def report(self, sample: Sample, reason: str) -> Json:
        """What the client gets of a sample: token ids in int32, log-probs in float32, both little-endian."""
        scored = (sample.whole.logprobs or {}).get("token_logprobs")
        scores = decoded(scored) or () if scored else ()
        report = {
            "sample": sample.index,
            "token_ids": array("i", sample.token_ids).tobytes(),
            "logprobs": array("f", [math.nan if one is None else one for one in scores]).tobytes() if scores else None,
            "text": sample.text,
            "finish_reason": reason,
            "stop_reason": opened(sample.last.get("stop_reason")),
            **sample.marks(),
        }
        if report["stop_reason"] is None:
            del report["stop_reason"]
        return report | ({UNSCORED: unscored} if (unscored := scores.count(None)) else {})

    def growth(self) -> list[Growth]:
        """Return what came since the last call, but no tokens whose version an update leaves open, and none before the
        end where they would not continue."""
        if self._ask and not self._ask.resumes and self.reply.open:
            return []
        steps = []
        for sample in self.reply.samples:
            if sample.index not in self.done and (step := self._of(sample).growth()) is not None:
                steps.append(step)
        if self._is_given:
            for step in steps:
                for part in step.parts:
                    part.prompt_token_ids = None  # the head has it
        return steps

    def restore(self, step: Growth) -> None:
        """Take a step of a gateway before this one."""
        if step.begins:
            self.drop(step.sample)
            self.reply.samples.append(Sample(step.sample))
        (sample,) = [one for one in self.reply.samples if one.index == step.sample]
        sample.restore(step.parts, step.spans, step.kv_versions, step.inexact, decoded(step.end) if step.end else None)
        self._of(sample).note()

    def drop(self, index: int) -> None:
        """Forget what was made of a sample."""
        others = [sample for sample in self.reply.samples if sample.index != index]
        self.reply = Reply(self.reply.prompt, others)
