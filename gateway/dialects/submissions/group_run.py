"""Runs one group of a submission: places, attempts, cuts and deaths are those of /v1/completions."""

import asyncio
import math
from dataclasses import replace
from enum import StrEnum
from functools import cached_property
from typing import Protocol

from msgspec import structs

from engines.errors import InvalidRequest
from gateway.dialects.completions import CompletionPrompt, Completions
from gateway.dialects.runner import Runner
from gateway.dialects.sample import ABORT, Reply, Sample
from gateway.dialects.submissions.group_record import GroupRecord
from gateway.dialects.submissions.words import Group, OnDeadline
from gateway.fleet.placement.sessions import session_key

DEADLINE = "deadline"
"""The finish_reason of a sample that its group's deadline ended."""


class Outcome(StrEnum):
    """The end of a group."""

    DELIVERED = "delivered"
    SHORT = "short"
    PARTIAL = "partial"
    EXPIRED = "expired"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Record(Protocol):
    """Takes what a run reports: new tokens of its samples, a sample's end."""

    def grew(self, run: "GroupRun") -> None: ...
    def ended(self, run: "GroupRun", sample: Sample, reason: str) -> None: ...


class GroupRun:
    """One group under way."""

    def __init__(self, group: Group, index: int, owner: str, submission_id: str, record: Record) -> None:
        self.group = group
        self.index = index
        self.model = ""
        """The model that makes it, once it has begun."""
        self.task: asyncio.Task[None] | None = None
        self.stopped: str | None = None
        """Why its client has ended it; "" where it lets the deadline pass."""
        self.rank = -math.inf
        """Its place by length among the groups of its submission; lower begins earlier."""
        self.num_good = 0
        """Samples that count towards `need`."""
        self._owner, self._submission_id, self._record = owner, submission_id, record
        self._enough = asyncio.Event()

    @cached_property
    def made(self) -> GroupRecord:
        """Begun with the group, and dropped at its end: a submission may have half a million samples."""
        return GroupRecord(self.index, self.group.n, self._given)

    @property
    def num_bytes(self) -> int:
        """Size of what its samples keep."""
        return self.made.num_bytes if "made" in vars(self) else 0

    @property
    def _given(self) -> list[int] | None:
        """The prompt's token ids, where the client has sent them."""
        return self.group.prompt if isinstance(self.group.prompt, list) else None

    @property
    def prompt(self) -> list[int]:
        """The token ids of its prompt; [] before they are known."""
        return self.made.reply.prompt or []

    @property
    def is_read_by_engine(self) -> bool:
        """True where an engine turned the client's text into token ids."""
        return self._given is None

    @property
    def left(self) -> list[int]:
        """The samples that have not ended."""
        return [index for index in range(self.group.n) if index not in self.made.done]

    def drop(self) -> None:
        """Forget the samples: the group has ended."""
        self.task = None
        vars(self).pop("made", None)

    def restore_end(self, index: int, *, is_good: bool) -> None:
        """Note a sample that a gateway before this one has ended."""
        self.made.drop(index)
        self.made.done.add(index)
        self.num_good += is_good

    async def run(self, completions: Completions, runner: Runner, left_s: float | None) -> Outcome:
        """Run to the end. Raise the error that ended it."""
        try:
            async with asyncio.timeout(left_s) as limit:
                await self._make(completions, runner)
        except TimeoutError:
            if not limit.expired():
                raise
            return self.at_deadline()
        return Outcome.DELIVERED if self._has_enough else Outcome.SHORT

    @property
    def _has_enough(self) -> bool:
        return self.num_good >= self.group.need

    def at_deadline(self) -> Outcome:
        """Treat open samples as the deadline asks, and return the outcome."""
        if self._has_enough:
            return Outcome.DELIVERED
        if self.group.on_deadline is OnDeadline.CANCEL:
            return Outcome.EXPIRED
        self.made.settle()
        begun = {sample.index: sample for sample in self.made.open}
        for index in self.left:
            self._record.ended(self, begun.get(index) or Sample(index), DEADLINE)
        return Outcome.PARTIAL

    async def _make(self, completions: Completions, runner: Runner) -> None:
        """Have the open samples made, until there are enough."""
        if self._has_enough or not self.left:
            return
        prompt = self._begun(completions)
        making = asyncio.ensure_future(runner.run(prompt, self.made.reply))
        waiting = asyncio.ensure_future(self._enough.wait())
        try:
            await asyncio.wait({making, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if making.done():
                making.result()
        finally:
            making.cancel()
            waiting.cancel()
            await asyncio.gather(making, waiting, return_exceptions=True)

    def _begun(self, completions: Completions) -> CompletionPrompt:
        prompt = decoded(completions, self.group, self.index, self._owner, self._submission_id)
        self.model = prompt.rollout.model
        prompt = replace(prompt, is_submitted=True)
        if not self.prompt and prompt.read:
            self.made.reply = Reply(prompt.read)
        self.made.begin(prompt)
        self.made.reply.heard = self._heard
        return prompt

    def _heard(self) -> None:
        """Report what came. A sample that has ended is delivered once its weight versions are known."""
        for sample in self.made.reply.samples:
            if sample.reason is not None and sample.index not in self.made.done and sample.is_known:
                self._end(sample, sample.reason)
        self._record.grew(self)
        if self._has_enough:
            self._enough.set()

    def _end(self, sample: Sample, reason: str) -> None:
        sample.stamp(sample.num_made)
        self.num_good += reason != ABORT
        self._record.ended(self, sample, reason)
        self.made.done.add(sample.index)
        sample.free()


def decoded(completions: Completions, group: Group, index: int, owner: str, submission_id: str) -> CompletionPrompt:
    """The group as a prompt of /v1/completions. Raise `InvalidRequest` with the group's place."""
    session = session_key(owner, group.session_id) if group.session_id else ""
    try:
        [read] = completions.decode(group.body, submission_id, session, first=index)
    except InvalidRequest as error:
        where = f"groups[{index}]"
        error.args = (f"{where}: {str(error).replace(f'prompt[{index}]', 'prompt')}",)
        error.param = f"{where}.{error.param}" if error.param else where
        raise
    rollout = structs.replace(read.rollout, priority=group.priority, owner=owner)
    return replace(read, rollout=rollout)
