"""Runs one group of a submission: places, attempts, cuts and deaths are those of /v1/completions."""

import asyncio
import math
from array import array
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Protocol

from engines.engine import Json
from engines.errors import InvalidRequest
from gateway.dialects import sample as made
from gateway.dialects.completion_prompt import CompletionPrompt
from gateway.dialects.completions import Completions
from gateway.dialects.parallel import Show, Streaming, chunks_of
from gateway.dialects.raw_json import opened
from gateway.dialects.resumption.chat import RENDER
from gateway.dialects.runner import Runner
from gateway.dialects.sample import Reply
from gateway.dialects.submissions.frames import Prompt, Tokens
from gateway.dialects.submissions.sample import Sample
from gateway.dialects.submissions.words import Group, OnDeadline
from gateway.dialects.token_generation import lacking
from gateway.dialects.usage import Usage
from gateway.fleet.concurrency import together
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.any_replica import AnyReplica
from gateway.fleet.placement.sessions import session_key

_RENDER_TIMEOUT_S = 60.0
DEADLINE = "deadline"
"""The finish_reason of a sample that its group's deadline ended."""


class Outcome(StrEnum):
    """The end of a group."""

    DELIVERED = "delivered"
    SHORT = "short"
    PARTIAL = "partial"
    SUSPENDED = "suspended"
    EXPIRED = "expired"
    FAILED = "failed"
    CANCELLED = "cancelled"


_AT_DEADLINE = {
    OnDeadline.CANCEL: Outcome.EXPIRED,
    OnDeadline.RETURN_PARTIAL: Outcome.PARTIAL,
    OnDeadline.RESUME: Outcome.SUSPENDED,
}


@dataclass(frozen=True, slots=True)
class Generation:
    """What runs groups: the dialect and its runner, and the engines that render conversations to token ids.

    `longest_wait_s` bounds the wait for an engine of a group's model while none serves.
    """

    completions: Completions
    runner: Runner
    fleet: Fleet
    any_replica: AnyReplica
    longest_wait_s: float

    async def render(self, group: Group) -> list[int]:
        """Return a prompt's token ids. Raise the engine's refusal, or `UnknownRoute` where no engine renders."""
        model, _ = self.fleet.asked(group.model)
        await self.fleet.serves_within(model, self.longest_wait_s)
        replicas = [replica for replica in self.fleet.alive if replica.info.model == model]
        able = [replica for replica in replicas if RENDER in replica.info.capabilities]
        if not able:
            raise lacking(f"{RENDER}, which `messages` need,", replicas)
        return list((await self.any_replica.ask(able, "POST", RENDER, group.rendering, _RENDER_TIMEOUT_S))["token_ids"])


class Record(Protocol):
    """Takes what a run reports: new tokens of a sample, a sample's end, a sample that begins again."""

    def grew(self, run: "GroupRun", sample: Sample) -> None: ...
    def ended(self, run: "GroupRun", sample: Sample) -> None: ...
    def restarted(self, run: "GroupRun", sample: Sample) -> None: ...


class GroupRun:
    """One group under way. `read` are the token ids of its prompt, once they are known."""

    def __init__(self, group: Group, index: int, owner: str, submission_id: str, record: Record) -> None:
        self.group = group
        self.index = index
        self.read: list[int] = []
        self.model = ""
        """The model that makes it, once it has begun."""
        self.task: asyncio.Task[None] | None = None
        self.stopped: str | None = None
        """Why its client has ended it; "" where it lets the deadline pass."""
        self.rank = -math.inf
        """Its place by length among the groups of its submission; lower begins earlier."""
        self.num_good = 0
        """Samples that count towards `need`."""
        self.num_bytes = 0
        """Size of the tokens of open samples."""
        self._owner, self._submission_id, self._record = owner, submission_id, record
        self._is_noted = False

    @cached_property
    def samples(self) -> list[Sample]:
        """Made as the group begins, and dropped at its end: a submission may have half a million."""
        return [Sample(sample, is_done=sample in self.group.done) for sample in range(self.group.n)]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.group.prompt if isinstance(self.group.prompt, list) else self.read)

    @property
    def is_read_by_engine(self) -> bool:
        """True where an engine turned the client's text or messages into token ids."""
        return bool(self.read) and not isinstance(self.group.prompt, list)

    @property
    def read_bytes(self) -> bytes:
        """The prompt as int32, little-endian."""
        return array("i", self.read).tobytes()

    def drop(self) -> None:
        """Forget the samples: the group has ended."""
        self.num_bytes, self.task = 0, None
        vars(self).pop("samples", None)

    def restore_end(self, index: int, *, is_good: bool) -> None:
        """Note a sample that a gateway before this one has ended."""
        self.restart(self.samples[index])
        self.samples[index].is_done = True
        self.num_good += is_good

    def restart(self, sample: Sample) -> None:
        """Drop the tokens of an open sample."""
        self.num_bytes -= sample.num_bytes
        sample.forget()

    def take_over(self, other: "GroupRun") -> None:
        """Take the tokens of a suspended group's open samples."""
        self.read = other.read
        for mine, its in zip(self.samples, other.samples, strict=True):
            if mine.is_open and (part := its.everything(self.index)):
                self.grow(part)
        other.drop()

    def grow(self, part: Tokens) -> None:
        """Take tokens of an open sample."""
        self.samples[part.sample].grow(part)
        self.num_bytes += len(part.token_ids) + len(part.logprobs)

    def read_step(self, *, again: bool = False) -> list[Prompt]:
        """The prompt for the record, where an engine has read it: once, or `again`."""
        if not self.is_read_by_engine or (self._is_noted and not again):
            return []
        self._is_noted = True
        return [Prompt(self.index, self.read_bytes)]

    @property
    def open(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.is_open]

    async def run(self, generation: Generation, left_s: float | None) -> Outcome:
        """Run to the end. Raise the error that ended it."""
        try:
            async with asyncio.timeout(left_s) as limit:
                await self._make(generation)
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
        if self.group.on_deadline is OnDeadline.RETURN_PARTIAL:
            for sample in self.open:
                self._record.ended(self, sample)
        return _AT_DEADLINE[self.group.on_deadline]

    async def _make(self, generation: Generation) -> None:
        if self._has_enough or not self.open:
            return
        prompt = await self._prompt(generation)
        if prompt.resumes:
            await self._read(partial(self._stream, generation.completions, prompt))
        else:
            await self._make_whole(generation.runner, prompt)

    async def _prompt(self, generation: Generation) -> CompletionPrompt:
        asked = self.group.prompt
        if asked is None:
            asked = self.read = self.read or await generation.render(self.group)
        prompt = decoded(generation.completions, self.group, self.index, self._owner, self._submission_id, asked)
        self.model = prompt.rollout.model
        return prompt

    async def _stream(self, completions: Completions, prompt: CompletionPrompt, show: Show) -> None:
        """Stream the open samples. A group without any token starts as a whole, or in its parts."""
        if len(self.open) == self.group.n and not any(sample.token_ids for sample in self.samples):
            await completions.stream([prompt], Usage(), show)
        else:
            read = self.read or prompt.body["prompt"]
            await completions.stream_rests(prompt, [sample.part(read) for sample in self.open], show)

    async def _read(self, work: Streaming) -> None:
        offset = self.index * self.group.n
        async with aclosing(chunks_of(work)) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    self._take(self.samples[choice["index"] - offset], opened(choice))
                if self._has_enough:
                    return

    def _take(self, sample: Sample, choice: Json) -> None:
        if not self.read and (read := choice.get("prompt_token_ids")):
            self.read = asked if isinstance(asked := self.group.prompt, list) and asked == read else read
        bytes_before = sample.num_bytes
        sample.add(choice)
        self.num_bytes += sample.num_bytes - bytes_before
        self._record.grew(self, sample)
        if sample.end is not None:
            self.num_bytes -= sample.num_bytes
            self.num_good += sample.counts
            self._record.ended(self, sample)

    async def _make_whole(self, runner: Runner, prompt: CompletionPrompt) -> None:
        """Make each open sample by itself: requests whose fields restart."""
        enough = asyncio.Event()

        async def make(sample: Sample) -> None:
            self.restart(sample)
            self._record.restarted(self, sample)
            alone = prompt.rest(Reply(prompt.read), made.Sample(sample.index))
            alone = replace(alone, rollout=replace(alone.rollout, goes_on=False))
            [choice] = (await runner.generate(alone))["choices"]
            self._take(sample, opened(choice))
            if self._has_enough:
                enough.set()

        making = asyncio.ensure_future(together(make(sample) for sample in self.open))
        waiting = asyncio.ensure_future(enough.wait())
        try:
            await asyncio.wait({making, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if making.done():
                making.result()
        finally:
            making.cancel()
            waiting.cancel()
            await asyncio.gather(making, waiting, return_exceptions=True)


def decoded(
    completions: Completions, group: Group, index: int, owner: str, submission_id: str, prompt: str | list[int]
) -> CompletionPrompt:
    """The group as a prompt of /v1/completions. Raise `InvalidRequest` with the group's place."""
    session = session_key(owner, group.session_id) if group.session_id else ""
    try:
        [read] = completions.decode(group.body(prompt), submission_id, session, first=index)
    except InvalidRequest as error:
        where = f"groups[{index}]"
        error.args = (f"{where}: {str(error).replace(f'prompt[{index}]', 'prompt')}",)
        error.param = f"{where}.{error.param}" if error.param else where
        raise
    rollout = replace(read.rollout, priority=group.priority, owner=owner)
    return replace(read, rollout=rollout, keeps_record=True)
