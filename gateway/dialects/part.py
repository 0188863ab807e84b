"""What one replica after the other makes of an `Ask`, which is a rollout in the words of its dialect."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from msgspec import structs

from engines.chunks import Choice, Chunk
from engines.engine import Json
from engines.errors import EngineError, EngineFailed, EngineRefused
from engines.raw_json import NO_JSON, opened
from gateway.config.schema import GatewayConfig
from gateway.dialects.resumption.features import inexact_fields
from gateway.dialects.sample import ABORT, CUT_OFF, Reply, Sample, Source
from gateway.dialects.streams import Show
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica

DEFAULT_MAX_TOKENS = 1024
"""Load of a sample that names no limit; an engine would let it fill the context."""
_CANNOT_CONTINUE = "the reply was cut off and cannot continue"
_TOLD_OF_ALL = ("routed_experts", "sampling_mask")  # encoded over all tokens of a choice


@dataclass(kw_only=True)  # frozen, it would cost a call for each field of each prompt
class Ask(ABC):
    """One rollout in the words of its dialect, or the rest of one of its samples: how an engine is asked.

    `limit` is the largest number of tokens of a sample, `room` that of prompt and sample together; None where it is not
    known. `read` are the token ids of the prompt, where they are known; `before` is the sample that continues here.
    `is_submitted` is True for a group of a submission: its samples may be delivered before they end, and have the
    log-probs of sampled tokens alone.
    """

    config: GatewayConfig
    rollout: Rollout
    body: Json
    limit: int | None
    room: int | None = None
    read: list[int] | None = None
    before: Sample | None = None
    is_submitted: bool = False

    @cached_property
    def inexact(self) -> tuple[str, ...] | None:
        """The fields with which samples that continue are marked; None if they may not continue from their tokens."""
        return inexact_fields(self.body)

    @property
    def resumes(self) -> bool:
        """True if samples may continue from their tokens."""
        return self.inexact is not None

    def continues(self, *, streams: bool) -> bool:
        """As `resumes`, for a client that streams or not."""
        return self.resumes

    @property
    def is_full(self) -> bool:
        """True for the rest of a sample that has all of its tokens: its engine died before it reported the end."""
        assert self.before is not None
        room = math.inf if self.room is None else self.room - len(self.prompt)
        limit = math.inf if self.limit is None else self.limit
        return 0 < self.before.num_made >= min(room, limit)

    @abstractmethod
    def reads_whole(self, replica: Replica) -> bool:
        """True where the reply to a client that does not stream is not read in chunks."""

    @abstractmethod
    async def asked(self, replica: Replica, *, streams: bool) -> tuple[str, Json]:
        """The route and the body for the replica's engine. With `streams` the client has what was made before."""

    @abstractmethod
    def bare(self) -> Json:
        """A choice without tokens."""

    @abstractmethod
    def bare_head(self) -> Json:
        """What is beside the choices of a reply that no engine has begun."""

    def head(self, reply: Reply) -> Json:
        """What a reply has beside its choices."""
        return (reply.head or self.bare_head()) | {"usage": reply.usage}

    def told(self, reply: Reply) -> Json:
        """A reply whose samples are told whole."""
        bare = self.bare()
        return self.head(reply) | {"choices": [sample.told(bare) for sample in reply.samples]}

    def worded(self, chunk: Chunk, replica: Replica, *, is_whole: bool) -> Chunk:
        """An engine's chunk in the words of the dialect. Raises one of `NO_JSON` where it cannot be read."""
        return chunk

    def shows(self, choice: Json, *, is_cut: bool) -> bool:
        """True if the client sees this choice of a chunk; `is_cut` where it was cut off and continues."""
        return True

    def named(self, error: EngineRefused) -> EngineRefused:
        """The error of an engine with the prompt that it refuses, where a request may have several."""
        return error

    @property
    def prompt(self) -> list[int]:
        """The token ids of the prompt of a rest."""
        assert self.read is not None
        return self.read

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
            attempts=rollout.attempts if self.before else rollout.attempts.branch(),
        )
        return replace(self, rollout=rest, read=read, before=sample)


class Part:
    """What one replica after the other makes of an `Ask`, until one has delivered, or has made tokens that continue."""

    def __init__(self, ask: Ask, reply: Reply, show: Show | None, served: int) -> None:
        """`served` is the version that a sample without tokens names."""
        self._served = served
        self.error: EngineError | None = None
        """Ends a stream whose client has what cannot continue."""
        self._ask, self._reply, self._show = ask, reply, show
        self.samples = reply.samples if ask.before is None else [ask.before]
        self._held: list[Json] | None = []
        """The chunks of a stream before the first with content, all of which an attempt may take back."""
        self._unvouched: list[Chunk] = []
        """Chunks of a stream that wait for the verdict on an update."""
        self._is_whole = False
        self._replica: Replica | None = None

    async def make(self, replica: Replica) -> None:
        """Read what the replica makes. Raise `EngineFailed` where it is not whole, and does not continue."""
        ask, self._held, self._unvouched, self._replica = self._ask, [], [], replica
        source = Source(replica, replica.take_off(ask.rollout), ask.rollout.adapter)
        for sample in self.samples:
            sample.begin(source)
        streams = self._show is not None
        self._is_whole = is_whole = not streams and ask.reads_whole(replica)
        try:
            path, body = await ask.asked(replica, streams=streams)
            if not is_whole:
                body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
            reader, timeout_s = replica.engine.beside, ask.config.generate_timeout_s
            assert reader is not None
            await reader.read(path, body, timeout_s, self._take, is_whole=is_whole, streams=streams)
        except EngineRefused as error:
            raise ask.named(error) from error.__cause__
        if streams:
            await replica.vouched()
            self._read(self._unvouched, replica)
        aborted = self._checked_ends(replica, is_whole=is_whole)
        if not streams:
            await replica.vouched()
        self._stamp()
        if aborted:
            self._end(aborted, ABORT)

    def _take(self, chunks: list[Chunk]) -> None:
        """Take chunks that came together. Those of a stream wait until their version is known."""
        replica = self._replica
        assert replica is not None
        replica.heard(self._ask.rollout)
        if self._show is not None and not replica.is_vouched:
            self._unvouched += chunks
            return
        waiting, self._unvouched = self._unvouched, []
        self._read(waiting + chunks, replica)

    def _read(self, chunks: list[Chunk], replica: Replica) -> None:
        """Read chunks, and show them where the client streams."""
        for chunk in chunks:
            try:
                chunk = self._ask.worded(chunk, replica, is_whole=self._is_whole)
                self._reply.take(chunk, self.samples)
            except NO_JSON as error:
                reason = f"its chunk is {chunk!r:.200}, not choices of {len(self.samples)} samples: {error}"
                raise EngineFailed(reason, replica_id=replica.replica_id) from error
            if replica.cuts_off and (self._show is None or self._continues):
                for choice in chunk.choices:
                    self.samples[choice.index].cut()
            if self._show is not None:
                self._pass_on(chunk, replica)
        if self._reply.heard is not None:
            self._reply.heard()

    def _pass_on(self, chunk: Chunk, replica: Replica) -> None:
        """Show a chunk, and those before it, once one has content."""
        choices = chunk.choices
        shown = [self._shown(choice, replica) for choice in choices]
        told = {**self._reply.head, "choices": shown}
        if chunk.usage is not None:
            told["usage"] = self._reply.usage
        if chunk.prompt_token_ids is not None and self._ask.before is None:
            told["prompt_token_ids"] = chunk.prompt_token_ids
        if self._held is not None:
            self._held.append(told)
            if not any(map(_has_content, choices)):
                ended = [choice for choice in choices if self.samples[choice.index].reason]
                if replica.cuts_off and any(choice.finish_reason == ABORT for choice in ended):
                    raise self._refused(_CANNOT_CONTINUE)
                if not ended:
                    return
        held, self._held = self._held or [told], None
        for told in held:
            self._emit(told)

    def _emit(self, told: Json) -> None:
        seen = []
        for choice in told["choices"]:
            is_cut = choice.get("finish_reason") == CUT_OFF
            if is_cut:
                choice |= {"finish_reason": None, "stop_reason": None}
            if self._ask.shows(choice, is_cut=is_cut):
                seen.append(choice)
        if self._show is not None and (seen or not told["choices"]):
            self._show(told | {"choices": seen})

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
            if scores := told.get("logprobs"):
                told["logprobs"] = shifted(opened(scores), sample.kept.num_characters)
        if sample.reason is not None or sample.is_cut:
            sample.stamp()
        if sample.reason is not None:
            told |= sample.marks()
        else:
            told |= {"finish_reason": CUT_OFF} if sample.is_cut else {}
        return told

    @property
    def _continues(self) -> bool:
        """True if samples may continue: from their tokens, or from the prompt beside others that have some."""
        return self._ask.continues(streams=self._show is not None) and self._reply.prompt is not None

    @property
    def _may_continue(self) -> bool:
        made = any(sample.num_new for sample in self.samples)
        return made and self._continues and not any(sample.tells(_TOLD_OF_ALL) for sample in self.samples)

    def _checked_ends(self, replica: Replica, *, is_whole: bool) -> list[Sample]:
        """Judge samples without an end when all has come. Raise `EngineFailed` where the reply is not whole; that of an
        external server that knows no `n` lacks samples. Return those that were aborted before their first token: vLLM
        sends no chunk for them, or an opening alone."""
        aborted: list[Sample] = []
        for sample in self.samples:
            if sample.reason is not None:
                continue
            if is_whole and not sample.has_come:
                found = sum(one.has_come for one in self.samples)
                raise self._refused(f"it answered with {found} choices, and {len(self.samples)} were asked for")
            if replica.cuts_off:
                sample.is_cut = True
            elif sample.num_new:
                reason = f"the stream ended before sample {sample.index} did, after {sample.num_made} tokens"
                raise EngineFailed(reason, replica_id=replica.replica_id)
            else:
                aborted.append(sample)
        if not replica.cuts_off:
            return aborted
        # vLLM ends a conversation so after the first tool call, also where more calls were to follow.
        is_half_called = self._show is None and any(sample.reason == "tool_calls" for sample in self.samples)
        if is_half_called or (any(sample.is_cut for sample in self.samples) and not self._may_continue):
            raise self._refused(_CANNOT_CONTINUE)
        return aborted

    def _refused(self, reason: str) -> EngineFailed:
        """The error of a reply that is refused for its content, of which nothing is kept."""
        assert self._replica is not None
        self._drop()
        return EngineFailed(reason, replica_id=self._replica.replica_id)

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

    def end(self, reason: str) -> None:
        """End what no replica has any more."""
        if left := [sample for sample in self.samples if sample.is_open]:
            self._end(left, reason)

    def _end(self, samples: Sequence[Sample], reason: str) -> None:
        ask, ends = self._ask, []
        for sample in samples:
            sample.end(reason, ask.rollout.adapter.version if ask.rollout.adapter else self._served)
            told = {**ask.bare(), **sample.last, "index": sample.index}
            if sample.num_made and "prompt_token_ids" in told:  # it came with the first tokens
                told["prompt_token_ids"] = None
            ends.append(told | sample.marks())
        if self._show is not None:
            self._show({**(self._reply.head or ask.bare_head()), "choices": ends, "usage": self._reply.usage})


def shifted(logprobs: Json, characters: int) -> Json:
    """Log-probs of a rest after so many characters of text. Those of token ids have no place in the text."""
    if "text_offset" not in logprobs:
        return logprobs
    return logprobs | {"text_offset": [characters + offset for offset in logprobs["text_offset"]]}


def _has_content(choice: Choice) -> bool:
    delta = choice.delta or {}
    return bool(choice.num_tokens or choice.text or any(delta[key] for key in delta if key != "role"))
