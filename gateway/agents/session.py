"""One session of an agent: its calls in order, each after the one whose tokens its prompt begins with."""

import asyncio
import math
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress

import msgspec

from engines.engine import Json
from engines.errors import DeadlineExceeded, GatewayUnreachable, RolloutGatewayError, SessionFrozen
from gateway.agents.call import Began, Call, Ended, Grown
from gateway.agents.history import History, Prompt, end_of
from gateway.agents.turn import Caller, Turn
from gateway.api import body_of
from gateway.dialects.sample import ABORT, Reply
from gateway.fleet.metrics import Metrics
from gateway.ledger.ledger import Record

SCHEMA_VERSION = 1
_AT_ONCE_BYTES = 1 << 18
_CUT_S = 10.0


class Head(msgspec.Struct, tag="session", frozen=True):
    """A session as it began, in seconds since the epoch. `metadata` is its client's own; None where it gave none."""

    owner: str
    id: str
    began: float
    metadata: Json | None = None


class Rewarded(msgspec.Struct, tag="rewarded", array_like=True, frozen=True):
    """A reward of one call, or of the whole session where `call` is None."""

    reward: float
    call: int | None = None
    info: Json | None = None


class Frozen(msgspec.Struct, tag="frozen", array_like=True, frozen=True):
    """No later call is taken."""


Step = Began | Grown | Ended | Rewarded | Frozen

read_head = msgspec.msgpack.Decoder(Head).decode
read_step = msgspec.msgpack.Decoder(Step).decode


class Session:
    """The calls of one session of one owner."""

    def __init__(self, head: Head, record: Record, metrics: Metrics) -> None:
        self.head, self.record = head, record
        self.owner, self.id = head.owner, head.id
        self.calls: list[Call] = []
        self._open: dict[int, Call] = {}
        self.history = History(self.ids_of)
        self.is_frozen = False
        self.was_read = False
        """True once a reader has had all of it after it was frozen."""
        self.used_at = time.monotonic()
        self.num_bytes = len(msgspec.msgpack.encode(head))
        self._reward: Rewarded | None = None
        self._asked: dict[tuple[int | None, bytes], int] = {}
        self._ended = asyncio.Event()
        self._metrics = metrics

    @property
    def state(self) -> str:
        return "frozen" if self.is_frozen else "open"

    @property
    def open(self) -> list[Call]:
        """The calls that have not ended."""
        return list(self._open.values())

    def ids_of(self, number: int) -> "array[int]":
        """Return the ids of a call's prompt and of what was sampled."""
        chain, at = [], self.calls[number]
        while at.began.parent is not None:
            chain.append(at)
            at = self.calls[at.began.parent]
        whole = array("i")
        for call in (at, *reversed(chain)):
            whole.frombytes(call.began.prompt_token_ids)
            whole += call.token_ids
        return whole

    # Calls

    def begin(self, turn: Turn, prompt: Prompt | None, model: str, caller: Caller) -> Call:
        """Record a call before it is generated; without a prompt it has no token ids. Raise `SessionFrozen`."""
        self.check_open()
        parent = prompt.parent if prompt else None
        ids = array("i", prompt.token_ids if prompt else ())
        before = None if parent is None else self.calls[parent]
        suffix = ids[before.began.prompt_tokens + len(before.token_ids) if before else 0 :].tobytes()
        asked = prompt.sampling if prompt else {**turn.sampling, "max_tokens": turn.max_tokens}
        # In its place before all that follows, and before a token: nothing is lost before it is written.
        began = Began(
            call=len(self.calls),
            parent=parent,
            root_reason=prompt.root_reason if prompt else "unknown",
            # Whatever the sampling: clients ask for an answer that was cut off with a higher limit.
            retry_of=self._asked.get((parent, suffix)) if prompt else None,
            dialect=caller.dialect,
            agent=caller.identity.agent if caller.identity else None,
            window=caller.identity.window if caller.identity else None,
            model=model,
            began=time.time(),
            prompt_tokens=len(ids),
            prompt_token_ids=suffix,
            sampling=msgspec.json.encode(asked, order="sorted"),
            tools=msgspec.json.encode(turn.tools) if parent is None else b"",
        )
        self.note(began)
        return self.calls[-1]

    def check_open(self) -> None:
        """Raise `SessionFrozen` where no call is taken any more."""
        if self.is_frozen:
            raise SessionFrozen(f"session is frozen: {self.id!r} takes no call any more; begin one under another id")

    @asynccontextmanager
    async def under_way(self, call: Call, reply: Reply | None) -> AsyncIterator[None]:
        """Ends a call that is cut or fails, with the tokens that `reply` has and the reason."""
        call.reply, call.task = reply, asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            self._stop(call, "cut", call.cut_for or "client_left")
            if not call.cut_for:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            self.check_open()
            raise GatewayUnreachable("the gateway ends: ask again") from None
        except RolloutGatewayError as error:
            body = body_of(error)
            self._stop(call, "failed", "unparsed" if call.is_made else "failed", body.get("error") or body)
            await self.record.written()
            raise
        except Exception:
            self._stop(call, "failed", "failed", {"message": "the gateway failed; its log has the reason"})
            raise

    def write_growth(self, calls: Iterable[Call]) -> None:
        """Write the tokens that open calls have got since the last time."""
        if steps := [step for call in calls for step in call.grow()]:
            self.record.add(*steps)

    async def end(self, call: Call, choice: Json, usage: Json, digest: bytes) -> None:
        """Record a call that was answered; `digest` is that of its history. Return once that is durable."""
        self.write_growth([call])
        number, how = call.began.call, (choice["finish_reason"], choice.get("stop_reason"))
        counts = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        end = end_of(*how, call.reply.prompt or [], call.token_ids) if call.reply else None
        defect = "no_token_ids" if end is None else None if call.is_scored else "no_logprobs"
        state, mask = ("cut", "cut") if choice["finish_reason"] == ABORT else ("ended", defect)
        self._end(Ended(number, time.time(), state, mask, *how, None, *counts, digest, end))
        await self.record.written()

    def _stop(self, call: Call, state: str, mask: str, error: Json | None = None) -> None:
        """End a call that has no answer."""
        if call.ended is not None:
            return
        call.settle()
        self.write_growth([call])
        self._end(Ended(call.began.call, time.time(), state, mask, error=error))

    def _end(self, ended: Ended) -> None:
        self.note(ended)
        call, tokens = self.calls[ended.call], self._metrics.session_tokens
        tokens.labels("sampled").inc(call.num_sampled)
        tokens.labels("captured").inc(len(call.token_ids))
        if call.is_scored:
            self._metrics.missing_logprobs.inc(sum(map(math.isnan, call.logprobs)))
        if call.mask is not None:
            self._metrics.masked_session_tokens.labels(call.mask).inc(call.num_sampled)
        ends, self._ended = self._ended, asyncio.Event()
        ends.set()

    # Trainers

    async def freeze(self, wait_s: float) -> None:
        """Take no later call. End open ones after so many seconds. Return once it is durable that none is open."""
        if not self.is_frozen:
            self.note(Frozen())
        await self.stop_calls("frozen", wait_s)
        await self.record.written()

    async def stop_calls(self, mask: str, wait_s: float) -> None:
        """Wait so long for open calls, then end them. Raise `DeadlineExceeded` where they do not end."""
        if await self._has_ended_within(wait_s):
            return
        for call in self.open:
            call.cut(mask)
        if not await self._has_ended_within(_CUT_S):
            raise DeadlineExceeded(f"calls of {self.id!r} have not ended within {_CUT_S:g} s: ask again")

    async def _has_ended_within(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._open:
                    await self._ended.wait()
        return not self._open

    @property
    def num_tokens(self) -> Json:
        """How many tokens were sampled; of those that count in training, and of others by the reason."""
        masked = Counter[str]()
        for call in self.calls:
            if call.mask is not None:
                masked[call.mask] += call.num_sampled
        sampled = sum(call.num_sampled for call in self.calls)
        trainable = sum(len(call.token_ids) for call in self.calls if call.ended and call.mask is None)
        return {"sampled": sampled, "trainable": trainable, "masked": dict(masked)}

    def report(self) -> Json:
        """Return the head, as readers get it first."""
        rewards = {str(call.began.call): call.reward for call in self.calls if call.reward is not None}
        return {
            "type": "session",
            "schema_version": SCHEMA_VERSION,
            "id": self.id,
            "state": self.state,
            "began": self.head.began,
            "calls": len(self.calls),
            "open_calls": len(self.open),
            "reward": self._reward and self._reward.reward,
            "rewards": rewards,
            "info": self._reward and self._reward.info,
            "metadata": self.head.metadata,
            "tokens": self.num_tokens,
        }

    async def read(self) -> AsyncGenerator[list[bytes]]:
        """Yield the calls in order, some at a time, then the end."""
        is_frozen = self.is_frozen
        some: list[bytes] = []
        calls = list(self.calls)
        for call in calls:
            some.append(msgspec.msgpack.encode(call.report()))
            if sum(map(len, some)) > _AT_ONCE_BYTES:
                yield some
                some = []
        yield [*some, msgspec.msgpack.encode({"type": "end", "calls": len(calls)})]
        self.was_read = self.was_read or is_frozen

    # Ledger

    def write(self) -> None:
        """Write all that there is as a new record."""
        self.record.begin([self.head, *self._steps()])

    def _steps(self) -> Iterator[Step]:
        for call in self.calls:
            yield from call.steps()
            if call.reward is not None:
                yield Rewarded(call.reward, call.began.call)
        if self._reward is not None:
            yield self._reward
        if self.is_frozen:
            yield Frozen()

    def restore(self, steps: Iterable[Step]) -> None:
        """Take the steps of a gateway before this one. Calls that were open end with the tokens that it has written."""
        for step in steps:
            self._take(step)
        for call in self.open:
            self._stop(call, "cut", "gateway_ended")

    def note(self, step: Step) -> None:
        """Take a step, such as a reward in place of the one before, and have it written."""
        self._take(step)
        self.record.add(step)

    def _take(self, step: Step) -> None:
        self.used_at = time.monotonic()
        match step:
            case Began():
                self.calls.append(call := Call(step))
                self._open[step.call] = call
                self.num_bytes += call.num_bytes
                if step.prompt_tokens:
                    self._asked.setdefault((step.parent, step.prompt_token_ids), step.call)
            case Grown():
                self.calls[step.call].take(step)
            case Ended():
                call = self._open.pop(step.call)
                call.take(step)
                self.num_bytes += 8 * len(call.token_ids)
                if step.end is not None:
                    self.history.add(step.call, step.digest, step.end)
            case Rewarded(call=None):
                self._reward = step
            case Rewarded():
                self.calls[step.call or 0].reward = step.reward
            case Frozen():
                self.is_frozen = True
