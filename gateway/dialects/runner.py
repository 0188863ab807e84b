"""Runs a rollout of any dialect, whole or streamed: place it, read what a replica makes, continue what was cut off."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import ClassVar, Self, TypeVar

from msgspec import structs

from engines.chunks import Choice, Chunk
from engines.engine import Json
from engines.errors import EngineError, EngineFailed, EngineRefused
from engines.raw_json import NO_JSON, opened
from gateway.config.schema import GatewayConfig
from gateway.dialects.resumption import inexact_fields
from gateway.dialects.sample import ABORT, Reply, Sample, Source
from gateway.dialects.sampling import versioned_salt
from gateway.dialects.streams import Show, total_usage, wants_usage, with_usage_rule
from gateway.fleet.concurrency import together
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.replica import Replica

DEFAULT_MAX_TOKENS = 1024
"""Load of a sample that names no limit; an engine would let it fill the context."""
_FULL = "length"
_NO_ADAPTER = nullcontext()
_SHORT_TOKENS = 64  # two coarse chunks
_TOLD_OF_ALL = ("routed_experts", "sampling_mask")  # encoded over all tokens of a choice
# Fields with which vLLM refuses to stream, or streams in another shape.
_WHOLE_ONLY = ("prompt_logprobs", "echo", "use_beam_search")


@dataclass(kw_only=True)  # frozen, it would cost a call for each field of each prompt
class Ask(ABC):
    """One rollout in the words of its dialect, or the rest of one of its samples: how an engine is asked.

    `limit` is the largest number of tokens of a sample, `room` that of prompt and sample together; None where it is not
    known. `read` are the token ids of the prompt, where they are known; `before` is the sample that continues here.
    """

    rollout: Rollout
    body: Json
    limit: int | None
    room: int | None = None
    read: list[int] | None = None
    before: Sample | None = None

    streams_continue: ClassVar[bool] = True
    """False where samples may continue in whole replies alone."""

    @property
    def sampling(self) -> Json:
        """The sampling parameters."""
        return self.body

    @cached_property
    def inexact(self) -> tuple[str, ...] | None:
        """The fields with which samples that continue are marked; None if they may not continue from their tokens."""
        return inexact_fields(self.sampling)

    @property
    def resumes(self) -> bool:
        """True if samples may continue from their tokens."""
        return self.inexact is not None

    @property
    def is_full(self) -> bool:
        """True for the rest of a sample that has all of its tokens: its engine died before it reported the end."""
        assert self.before is not None
        room = math.inf if self.room is None else self.room - len(self.read or ())
        limit = math.inf if self.limit is None else self.limit
        return 0 < self.before.num_made >= min(room, limit)

    def reads_whole(self, replica: Replica) -> bool:
        """True where the reply to a client that does not stream is not read in chunks.

        Engines that we start send coarse chunks, which cost them nothing; the samples of one prompt even gain by it
        (vLLM 0.26 made 9 % more tokens). A short single sample is read whole: it has few tokens to lose, and chunks
        cost this process three times the CPU. A rest is read in chunks, however short: where engines die in a row, each
        is to add tokens.
        """
        is_short = self.rollout.n == 1 and (self.limit or DEFAULT_MAX_TOKENS) <= _SHORT_TOKENS
        if not replica.info.streams or (is_short and not self.rollout.goes_on):
            return True
        asked = map(self.sampling.get, _WHOLE_ONLY)
        return any(value is not None and value is not False for value in asked)

    @abstractmethod
    async def asked(self, replica: Replica, *, streams: bool) -> tuple[str, Json]:
        """The route, and a new body for the replica's engine. With `streams` the client has what was made before."""

    @abstractmethod
    def bare(self) -> Json:
        """A choice without tokens."""

    @abstractmethod
    def bare_head(self) -> Json:
        """What is beside the choices of a reply that no engine has begun."""

    def told(self, reply: Reply) -> Json:
        """A reply whose samples are told whole."""
        bare, head = self.bare(), reply.head or self.bare_head()
        return {**head, "usage": reply.usage, "choices": [sample.told(bare) for sample in reply.samples]}

    def as_asked(self, told: Json) -> Json:
        """A reply or chunk with what its client has asked for, by the names that it knows."""
        return told

    def shows(self, choice: Json) -> bool:
        """True if the client sees this choice of a chunk."""
        return True

    def named(self, error: EngineRefused) -> EngineRefused:
        """The error of an engine with the prompt that it refuses, where a request may have several."""
        return error

    def rest(self, reply: Reply, sample: Sample) -> Self:
        """The rest of one sample, whose tokens an engine reads after the prompt."""
        rollout, read = self.rollout, reply.prompt or []
        rest = structs.replace(
            rollout,
            request_id=rollout.request_id if rollout.n == 1 else f"{rollout.request_id}-{sample.index}",
            n=1,
            tokens=len(read) + max(self.limit or DEFAULT_MAX_TOKENS, sample.num_made),
            prompt_tokens=len(read) + sample.num_made,
            goes_on=True,
            attempts=rollout.attempts if self.before else copy(rollout.attempts),  # counted by itself from here on
        )
        return replace(self, rollout=rest, read=read, before=sample)


A = TypeVar("A", bound=Ask)


def using(rollout: Rollout) -> AbstractContextManager[None]:
    """Keeps the adapter of a rollout loaded, if it has one."""
    if rollout.adapter is None:
        return _NO_ADAPTER
    return rollout.adapter.used(rollout.request_id, goes_on=rollout.goes_on)


class Runner:
    """Has the replicas that the scheduler picks make rollouts. `lengths` are those that samples of prompts had."""

    def __init__(self, config: GatewayConfig, scheduler: Scheduler, fleet: Fleet, metrics: Metrics) -> None:
        self._timeout_s = config.generate_timeout_s
        self._scheduler = scheduler
        self._fleet = fleet
        self.lengths = scheduler.lengths
        self._metrics = metrics

    async def run(self, ask: Ask, reply: Reply, show: Show | None = None) -> None:
        """Have replicas make all samples to their ends. `show` gets the chunks, if it is a stream. Open samples of
        `reply`, which a gateway before this one has begun, continue."""
        try:
            with using(ask.rollout):  # also between what was cut off and its rest
                if not reply.samples:
                    await self.make(ask, reply, show)
                if reply.open:
                    await self.go_on(ask, reply, show)
        finally:
            self.learn(ask.rollout, reply.usage, list(map(attrgetter("reason"), reply.samples)))
            if show is not None:
                self.count_missing(reply.num_unscored)

    async def stream(self, asks: Sequence[Ask], usages: list[Json], show: Show) -> None:
        """Show the chunks of all prompts in the order of arrival, as if one engine made them. Add the token counts of
        each to `usages`, also where the client leaves or an engine that died has not told its count."""
        body, turns = asks[0].body, [(ask, Reply(ask.read)) for ask in longest_first(asks)]

        def shown(ask: Ask, chunk: Json) -> None:
            if chunk["choices"]:
                show(with_usage_rule(ask.as_asked(chunk), body))

        try:
            await together(self.run(ask, reply, partial(shown, ask)) for ask, reply in turns)
        finally:
            usages += [reply.usage for _, reply in turns if reply.head or (reply.samples and not reply.open)]
        if wants_usage(body):
            ask, reply = turns[0]
            show(ask.as_asked({**(reply.head or ask.bare_head()), "choices": []}) | {"usage": total_usage(usages)})

    async def go_on(self, ask: Ask, reply: Reply, show: Show | None = None) -> None:
        """Have the open samples continued, each by itself, until they end."""
        await together(self.continue_sample(ask, reply, sample, show) for sample in reply.open)

    async def continue_sample(self, ask: Ask, reply: Reply, sample: Sample, show: Show | None = None) -> None:
        """Have one sample continued until it ends."""
        while sample.is_open:
            ask = ask.rest(reply, sample)
            self._metrics.kept_tokens.inc(sample.num_new)
            sample.keep(ask.inexact or ())
            await self.make(ask, reply, show)

    async def make(self, ask: Ask, reply: Reply, show: Show | None = None) -> None:
        """Have one replica make what is asked. Its samples are open after it where it was cut off, or failed."""
        if not reply.samples:
            reply.samples = [Sample(index, keeps_content=show is None) for index in range(ask.rollout.n)]
        part = Part(ask, reply, show, self._fleet, self._timeout_s)
        if ask.before is not None and ask.is_full:
            part.end(part.samples, _FULL)
            return
        await self._scheduler.run(ask.rollout, part.make, part.kept)
        if part.error is not None:
            raise part.error
        if reply.heard is not None:
            reply.heard()

    def count_missing(self, missing: int) -> None:
        """Count the tokens of samples that end which lack their log-prob."""
        if missing:
            self._metrics.missing_logprobs.inc(missing)

    def learn(self, rollout: Rollout, usage: Json, ends: Sequence[str | None]) -> None:
        """Remember the lengths of a rollout whose samples all ended by themselves."""
        made = usage.get("completion_tokens")
        if made and None not in ends and ABORT not in ends:
            self.lengths.delivered(rollout.model, rollout.prompt_key, made / rollout.n)


def longest_first(asks: Sequence[A]) -> Sequence[A]:
    """The order in which the prompts of one request take their turns."""
    return asks if len(asks) == 1 else sorted(asks, key=lambda ask: ask.rollout.rank)


class Part:
    """What one replica after the other makes of an `Ask`, until one has delivered, or has made tokens that continue."""

    def __init__(self, ask: Ask, reply: Reply, show: Show | None, fleet: Fleet, timeout_s: float) -> None:
        self.error: EngineError | None = None
        """Ends a stream whose client has what cannot continue."""
        self._ask, self._reply, self._show, self._fleet, self._timeout_s = ask, reply, show, fleet, timeout_s
        self.samples = reply.samples if ask.before is None else [ask.before]
        self._held: list[Json] | None = []
        """The chunks of a stream before the first with content, all of which an attempt may take back."""
        self._unvouched: list[Chunk] = []
        """Chunks of a stream that wait for the verdict on an update."""
        self._is_whole = False
        self._replica: Replica | None = None

    async def make(self, replica: Replica) -> None:
        """Read what the replica makes. Raise `EngineFailed` where it is not whole, and does not continue.

        An error of an engine that an update overwrites waits for the verdict: weights that are refused may be its
        cause, as NaN is of vLLM's 400, and it is `EngineOverwritten` then.
        """
        ask, streams, reader = self._ask, self._show is not None, replica.engine.beside
        assert reader is not None
        self._held, self._unvouched, self._replica = [], [], replica
        source = Source(replica, replica.take_off(ask.rollout), ask.rollout.adapter)
        for sample in self.samples:
            sample.begin(source)
        self._is_whole = is_whole = not streams and ask.reads_whole(replica)
        try:
            path, body = await ask.asked(replica, streams=streams)
            body["cache_salt"] = versioned_salt(ask.body, replica, ask.rollout.adapter)
            if not is_whole:
                body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
            await reader.read(path, body, self._timeout_s, self._take, is_whole=is_whole, streams=streams)
            if streams:
                await replica.vouched()
                self._read(self._unvouched)
            aborted = self._checked_ends(source)
        except (EngineRefused, EngineFailed) as error:
            await replica.vouched()
            if isinstance(error, EngineRefused):
                raise ask.named(error) from error.__cause__
            raise
        if not streams:
            await replica.vouched()
        self._stamp()
        if aborted:
            self.end(aborted, ABORT)

    def _take(self, chunks: list[Chunk]) -> None:
        """Take chunks that came together. Those of a stream wait until their version is known."""
        replica = self._replica
        assert replica is not None
        replica.heard(self._ask.rollout)
        if self._show is not None:
            chunks, self._unvouched = self._unvouched + chunks, []
            if not replica.is_vouched:
                self._unvouched = chunks
                return
        self._read(chunks)

    def _read(self, chunks: list[Chunk]) -> None:
        """Read chunks, and show them where the client streams."""
        replica = self._replica
        assert replica is not None
        for chunk in chunks:
            try:
                self._reply.take(chunk, self.samples)
            except NO_JSON as error:
                reason = f"its chunk is {chunk!r:.200}, not choices of {len(self.samples)} samples: {error}"
                raise EngineFailed(reason, replica_id=replica.replica_id) from error
            if self._show is not None:
                self._pass_on(chunk, replica, self._show)
        if self._reply.heard is not None:
            self._reply.heard()

    def _pass_on(self, chunk: Chunk, replica: Replica, show: Show) -> None:
        """Show a chunk, and those before it, once one has content."""
        choices = [self._shown(choice, replica) for choice in chunk.choices]
        told = {**self._reply.head, "choices": choices}
        if chunk.usage is not None:
            told["usage"] = self._reply.usage
        if chunk.prompt_token_ids is not None and self._ask.before is None:
            told["prompt_token_ids"] = chunk.prompt_token_ids
        if self._held is not None:
            self._held.append(told)
            if not any(_has_content(choice) or self.samples[choice.index].reason for choice in chunk.choices):
                return
        held, self._held = self._held or [told], None
        for told in held:
            seen = list(filter(self._ask.shows, told["choices"]))
            if seen or not told["choices"]:
                show(told | {"choices": seen})

    def _shown(self, choice: Choice, replica: Replica) -> Json:
        """A choice of a chunk as the client gets it, with the spans of all its tokens where it is the last."""
        sample, adapter, told = self.samples[choice.index], self._ask.rollout.adapter, choice.fields()
        told |= {
            "index": sample.index,
            "finish_reason": choice.finish_reason,
            "weight_version": adapter.version if adapter else replica.weight_version,
        }
        told.pop("weight_versions", None)
        if self._ask.before is not None:
            if sample.kept.shows_prompt and "prompt_token_ids" in told:
                told["prompt_token_ids"] = None
            scores = told.get("logprobs")
            if scores and "text_offset" in scores:  # those of token ids have no place in the text
                offsets = [sample.kept.num_characters + offset for offset in opened(scores["text_offset"])]
                told["logprobs"] = scores | {"text_offset": offsets}
        if sample.reason is not None:
            sample.stamp()
            told |= sample.marks()
        return told

    @property
    def _continues(self) -> bool:
        """True if samples may continue: from their tokens, or from the prompt beside others that have some."""
        ask = self._ask
        return ask.resumes and (self._show is None or ask.streams_continue) and self._reply.prompt is not None

    @property
    def _may_continue(self) -> bool:
        made = any(sample.num_new for sample in self.samples)
        return made and self._continues and not any(sample.tells(_TOLD_OF_ALL) for sample in self.samples)

    def _checked_ends(self, source: Source) -> list[Sample]:
        """Judge samples without an end when all has come. Raise `EngineFailed` where the reply is not whole; that of an
        external server that knows no `n` lacks samples. Return those that a trainer's pause aborted before their first
        token: vLLM sends no chunk for them, or an opening alone."""
        aborted: list[Sample] = []
        for sample in self.samples:
            if sample.reason is not None:
                continue
            if self._is_whole and not sample.has_come:
                found = sum(one.has_come for one in self.samples)
                reason = f"it answered with {found} choices, and {len(self.samples)} were asked for"
                self._drop()
                raise EngineFailed(reason, replica_id=source.replica.replica_id)
            if sample.num_new or not source.flight.may_abort:
                reason = f"the stream ended before sample {sample.index} did, after {sample.num_made} tokens"
                raise EngineFailed(reason, replica_id=source.replica.replica_id)
            aborted.append(sample)
        return aborted

    def kept(self, error: EngineError) -> bool:
        """True if no attempt follows the one that failed: its samples have ended, or continue elsewhere."""
        has_shown = self._show is not None and self._held is None
        is_known = has_shown or (self._replica is not None and self._replica.weight_version is not None)
        has_all = not any(sample.is_open for sample in self.samples)
        if is_known and (has_all or self._may_continue):
            self._stamp()
            return True
        if has_shown:
            self.error = error
        self._drop()
        return has_shown

    def _drop(self) -> None:
        """Keep nothing of what was made."""
        for sample in self.samples:
            sample.drop()

    def _stamp(self) -> None:
        counted = self._reply.counted if len(self.samples) == 1 else None
        for sample in self.samples:
            sample.stamp(counted)

    def end(self, samples: Sequence[Sample], reason: str) -> None:
        """End samples that no replica has any more."""
        ask, ends = self._ask, []
        for sample in samples:
            adapter = ask.rollout.adapter
            sample.end(reason, adapter.version if adapter else self._fleet.version_of(ask.rollout.model))
            told = {**ask.bare(), **sample.last, "index": sample.index}
            if sample.num_made and "prompt_token_ids" in told:  # it came with the first tokens
                told["prompt_token_ids"] = None
            ends.append(told | sample.marks())
        if self._show is not None and ends:
            self._show({**(self._reply.head or ask.bare_head()), "choices": ends, "usage": self._reply.usage})


def _has_content(choice: Choice) -> bool:
    delta = choice.delta or {}
    return bool(choice.num_tokens or choice.text or any(delta[key] for key in delta if key != "role"))
