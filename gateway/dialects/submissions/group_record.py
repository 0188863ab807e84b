"""The samples of one group as they are made, and how much of them the ledger has."""

import math
from array import array

import orjson
from msgspec import Raw

from engines.chunks import Choice, joined
from engines.engine import Json
from engines.raw_json import decoded, encoded, opened
from gateway.dialects.resumption import MARK
from gateway.dialects.runner import Ask
from gateway.dialects.sample import UNSCORED, Reply, Sample
from gateway.dialects.submissions.frames import Growth, Prompt, Restart, Step


class Recorded:
    """How much of a sample the record has."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.is_whole = False
        """True once the sample has ended, and the record has that."""
        self._num_tokens = 0
        self._num_parts = 0
        self._num_voids = sample.num_voids

    def growth(self) -> tuple[Json, bool] | None:
        """Return what the sample has got since the last call, as a choice, and True if that is all of it: the first
        time, or again where a part that was returned has become void. None where there is nothing, or of no known
        version."""
        sample, is_ended = self.sample, self.sample.reason is not None
        if sample.num_voids != self._num_voids:
            self._num_tokens, self._num_parts, self._num_voids = 0, 0, sample.num_voids
            self.is_whole = False
        ends = is_ended and not self.is_whole and (sample.has_ids or sample.spans is not None)
        if not sample.is_known or (sample.num_made == self._num_tokens and not ends):
            return None
        is_all, new = not self._num_parts, joined(sample.parts[self._num_parts :] or [Choice(sample.index)])
        self._num_tokens, self._num_parts, self.is_whole = sample.num_made, len(sample.parts), is_ended
        spans, kv_versions = sample.stamps_of(sample.num_made)
        told = (sample.last if is_ended else {}) | {
            "index": sample.index,
            "finish_reason": sample.reason,
            "token_ids": new.token_ids and Raw(new.token_ids),
            "logprobs": new.scores,
            "text": new.text or "",
            "prompt_token_ids": None,
            "weight_versions": spans,
            "kv_versions": kv_versions,
        }
        return told | ({MARK: sample.inexact} if sample.is_resumed else {}), is_all


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
        self._has_prompt = False

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
        return bool(self.reply.samples) and all(self._of(sample).is_whole for sample in self.reply.samples)

    def _of(self, sample: Sample) -> Recorded:
        """What the record has of a sample, which may take the place of another."""
        found = self._recorded.get(sample.index)
        return found if found and found.sample is sample else Recorded(sample)

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

    def growth(self) -> list[Step]:
        """Return what came since the last call, but no tokens whose version an update leaves open, and none before the
        end where they would not continue."""
        steps: list[Step] = []
        if self._ask and not self._ask.resumes and self.reply.open:
            return steps
        for sample in self.reply.samples:
            recorded = self._of(sample)
            if sample.index in self.done or (grown := recorded.growth()) is None:
                continue
            choice, is_all = grown
            if not self._has_prompt and not self._is_given:
                self._has_prompt = True
                steps.append(Prompt(self.group, array("i", self.reply.prompt or ()).tobytes()))
            if is_all and sample.index in self._recorded:
                steps.append(Restart(self.group, sample.index))
            self._recorded[sample.index] = recorded
            steps.append(Growth(self.group, sample.index, encoded(choice)))
        return steps

    def everything(self) -> list[Step]:
        """Return all that there is, for a new record."""
        self._recorded.clear()
        self._has_prompt = False
        return self.growth()

    def restore(self, step: Step) -> None:
        """Take a step of a gateway before this one."""
        samples = self.reply.samples
        match step:
            case Prompt(_, token_ids):
                self.reply, self._has_prompt = Reply(array("i", token_ids).tolist(), samples), True
            case Restart(_, index):
                self.reply.samples = [sample for sample in samples if sample.index != index]
            case Growth(_, index, choice):
                sample = next((one for one in samples if one.index == index), None)
                if sample is None:
                    sample = Sample(index)
                    samples.append(sample)
                    if not self._is_given:
                        sample.prompt = encoded(self.reply.prompt)
                sample.restore(orjson.loads(choice))
                self._recorded[index] = recorded = self._of(sample)
                recorded.growth()  # the record has it
