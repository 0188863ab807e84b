"""One session of an agent: its calls in order, each after the one whose tokens its prompt begins with."""

import asyncio
import math
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from copy import copy
from functools import partial
from typing import Any

import msgspec

from engines.engine import Json
from engines.errors import DeadlineExceeded, GatewayUnreachable, RolloutGatewayError, SessionFrozen
from engines.raw_json import decoded
from gateway.agents.call import Call, Facts, Grown
from gateway.agents.history import UNKNOWN, History, Prompt
from gateway.agents.media import Media, id_of, media_in, media_of
from gateway.agents.turn import Caller, Turn
from gateway.api import body_of
from gateway.dialects.sample import ABORT, Reply
from gateway.fleet.metrics import Metrics
from gateway.ledger.ledger import Record

SCHEMA_VERSION = 1
CLIENT_LEFT = "client_left"
_CUT_S = 10.0


class Head(msgspec.Struct, tag="session"):
    """A session without its calls; `began` is in seconds since the epoch. `metadata` is its client's own; None where it
    gave none. `reward` and `info` are the last that its trainer gave. A frozen one takes no call any more."""

    owner: str
    id: str
    began: float
    metadata: Json | None = None
    reward: float | None = None
    info: Json | None = None
    is_frozen: bool = False


class Changed(msgspec.Struct, tag="changed", array_like=True, frozen=True):
    """Fields with their new values: of a call, or of the session's head where `call` is None."""

    call: int | None
    fields: dict[str, Any]


Step = Facts | Grown | Changed | Media

read_head = msgspec.msgpack.Decoder(Head).decode
read_steps = msgspec.msgpack.Decoder(list[Step]).decode


class Session:
    """The calls of one session of one owner."""

    def __init__(self, head: Head, record: Record, metrics: Metrics) -> None:
        self.head, self.record = head, record
        record.growth_of = lambda number: self.calls[number].grow()
        self.key = head.owner, head.id
        self.calls: list[Call] = []
        self.history = History(self.ids_of)
        self.used_at = time.monotonic()
        self.num_bytes = len(msgspec.msgpack.encode(head))
        self.open: dict[int, Call] = {}
        """Those that have not ended."""
        self._media: dict[str, Media] = {}
        self._asked = defaultdict[tuple[int | None, bytes], list[int]](list)  # calls with the same prompt
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._metrics = metrics

    @property
    def state(self) -> str:
        return "frozen" if self.head.is_frozen else "open"

    def ids_of(self, number: int) -> "array[int]":
        """Return the ids of a call's prompt and of what was sampled."""
        chain = [self.calls[number]]
        while (parent := chain[-1].facts.parent) is not None:
            chain.append(self.calls[parent])
        whole = array("i")
        for call in reversed(chain):
            whole.frombytes(call.facts.prompt_token_ids)
            whole += call.token_ids
        return whole

    # Calls

    def begin(self, turn: Turn, prompt: Prompt | None, model: str, caller: Caller) -> Call:
        """Record a call before it is generated; without a prompt it has no token ids. Raise `SessionFrozen`."""
        self.check_open()
        parent = prompt.parent if prompt else None
        ids = array("i", prompt.token_ids if prompt else ())
        suffix = ids[0 if parent is None else self.calls[parent].length :].tobytes()
        asked = prompt.sampling if prompt else {**turn.sampling, "max_tokens": turn.max_tokens}
        parts = [(id_of(part), part) for part in media_in(turn.messages)]
        for name, part in parts:
            if name not in self._media:
                self._note(media_of(part))
        # In its place before all that follows, and before a token: nothing is lost before it is written.
        facts = Facts(
            call=len(self.calls),
            parent=parent,
            root_reason=prompt.root_reason if prompt else UNKNOWN,
            retry_of=self._repeated(self._asked[parent, suffix], asked, caller) if prompt else None,
            dialect=caller.dialect,
            agent=caller.identity.agent if caller.identity else None,
            window=caller.identity.window if caller.identity else None,
            model=model,
            began=time.time(),
            prompt_tokens=len(ids),
            prompt_token_ids=suffix,
            sampling=msgspec.json.encode(asked, order="sorted"),
            tools=msgspec.json.encode(turn.tools) if parent is None else b"",
            media=[name for name, _ in parts],
        )
        self._note(facts)
        return self.calls[-1]

    def _repeated(self, same: list[int], asked: Json, caller: Caller) -> int | None:
        """Return the call with the same prompt in whose place this one is made: the latest without a retry whose client
        has no answer, or one that a lower limit cut off; else, where it says that it asks again, the latest."""
        retried = {self.calls[number].facts.retry_of for number in same}
        latest = [number for number in reversed(same) if number not in retried]
        for number in latest:
            before = self.calls[number].facts
            is_short = before.finish_reason == "length" and decoded(before.sampling)["max_tokens"] < asked["max_tokens"]
            if before.mask or is_short:
                return number
        return latest[0] if latest and caller.is_retry else None

    def check_open(self) -> None:
        """Raise `SessionFrozen` where no call is taken any more."""
        if self.head.is_frozen:
            raise SessionFrozen(f"session is frozen: {self.head.id!r} takes no later call; begin one under another id")

    @asynccontextmanager
    async def under_way(self, call: Call, reply: Reply | None) -> AsyncIterator[None]:
        """Ends a call that is cut or fails, with the tokens that `reply` has and the reason."""
        call.reply, call.task = reply, asyncio.current_task()
        if reply is not None:
            reply.heard = partial(self.record.grew, call.facts.call)
        try:
            yield
        except asyncio.CancelledError:
            self._stop(call, "cut", call.cut_for or CLIENT_LEFT)
            if not call.cut_for:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            self.check_open()
            raise GatewayUnreachable("the gateway ends: ask again") from None
        except RolloutGatewayError as error:
            body, is_made = body_of(error), reply is not None and reply.samples and not reply.open
            self._stop(call, "failed", "unparsed" if is_made else "failed", body.get("error") or body)
            await self.record.written()
            raise
        except Exception:
            self._stop(call, "failed", "failed", {"message": "the gateway failed; its log has the reason"})
            raise

    async def end(self, call: Call, choice: Json, usage: Json, digest: bytes) -> None:
        """Record a call that was answered; `digest` is that of its history. Return once that is durable."""
        self.record.grew(call.facts.call)
        self.record.write_growth()
        defect = "no_token_ids" if call.reply is None else None if call.is_scored else "no_logprobs"
        state, mask = ("cut", "cut") if choice["finish_reason"] == ABORT else ("ended", defect)
        self._end(
            call,
            state=state,
            mask=mask,
            finish_reason=choice["finish_reason"],
            stop_reason=choice.get("stop_reason"),
            prompt_tokens=call.facts.prompt_tokens or usage.get("prompt_tokens") or 0,
            num_sampled=usage.get("completion_tokens") or 0,
            digest=b"" if call.reply is None else digest,
        )
        await self.record.written()

    def undelivered(self, call: Call) -> None:
        """Note that the client of a call has left before it had the whole answer."""
        if call.facts.ended and call.facts.mask is None:
            self._change(call.facts.call, state="cut", mask=CLIENT_LEFT)
            self._metrics.masked_session_tokens.labels(CLIENT_LEFT).inc(call.num_sampled)

    def _stop(self, call: Call, state: str, mask: str, error: Json | None = None) -> None:
        """End a call that has no answer."""
        if call.facts.ended is None:
            for sample in call.reply.samples if call.reply else ():
                sample.settle()
            self.record.grew(call.facts.call)
            self.record.write_growth()
            self._end(call, state=state, mask=mask, error=error)
        elif mask == CLIENT_LEFT:
            self.undelivered(call)

    def _end(self, call: Call, **how: Any) -> None:
        self._change(call.facts.call, ended=time.time(), **how)
        tokens = self._metrics.session_tokens
        tokens.labels("sampled").inc(call.num_sampled)
        tokens.labels("captured").inc(len(call.token_ids))
        if call.is_scored:
            self._metrics.missing_logprobs.inc(sum(map(math.isnan, call.logprobs)))
        if call.facts.mask is not None:
            self._metrics.masked_session_tokens.labels(call.facts.mask).inc(call.num_sampled)
        self._settle(call)

    def _settle(self, call: Call) -> None:
        """Have later turns follow a call that has ended."""
        call.reply = call.task = None
        del self.open[call.facts.call]
        if not self.open:
            self._is_idle.set()
        self.num_bytes += 8 * len(call.token_ids)
        if (end := call.end) is not None:
            self.history.add(call.facts.call, call.facts.digest, end)

    # Trainers

    def reward(self, reward: float | None, call: int | None = None, info: Json | None = None) -> None:
        """Set the reward of one call, or that of the session where `call` is None, and its `info`; None is no news."""
        if given := {name: value for name, value in (("reward", reward), ("info", info)) if value is not None}:
            self._change(call, **given)

    async def freeze(self, wait_s: float) -> None:
        """Take no later call. End open ones after so many seconds. Return once it is durable that none is open."""
        if not self.head.is_frozen:
            self._change(None, is_frozen=True)
        await self.stop_calls("frozen", wait_s)
        await self.record.written()

    async def stop_calls(self, mask: str, wait_s: float) -> None:
        """Wait so long for open calls, then end them. Raise `DeadlineExceeded` where they do not end."""
        if await self._has_ended_within(wait_s):
            return
        for call in list(self.open.values()):
            call.cut(mask)
        if not await self._has_ended_within(_CUT_S):
            raise DeadlineExceeded(f"calls of {self.head.id!r} have not ended within {_CUT_S:g} s: ask again")

    async def _has_ended_within(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        return not self.open

    @property
    def num_tokens(self) -> Json:
        """How many tokens were sampled; of those that count in training, and of others by the reason."""
        masked = Counter[str]()
        for call in self.calls:
            if call.facts.mask is not None:
                masked[call.facts.mask] += call.num_sampled
        sampled = sum(call.num_sampled for call in self.calls)
        trainable = sum(len(call.token_ids) for call in self.calls if call.facts.ended and call.facts.mask is None)
        return {"sampled": sampled, "trainable": trainable, "masked": dict(masked)}

    def report(self) -> Json:
        """Return the head, as readers get it first."""
        head = msgspec.structs.asdict(self.head)
        rewards = {str(call.facts.call): call.facts.reward for call in self.calls if call.facts.reward is not None}
        return {
            "type": "session",
            "schema_version": SCHEMA_VERSION,
            **{name: head[name] for name in ("id", "began", "metadata", "reward", "info")},
            "state": self.state,
            "calls": len(self.calls),
            "open_calls": len(self.open),
            "rewards": rewards,
            "tokens": self.num_tokens,
        }

    def records(self) -> Iterator[Json]:
        """Yield the calls in order, then the end, as readers get them after the head."""
        media = dict(self._media)
        for call in self.calls:
            found = [(name, media.pop(name, None)) for name in call.facts.media]  # with the first call that has it
            told = [{"id": name} | (msgspec.structs.asdict(one) if one else {}) for name, one in found]
            yield call.report() | {"media": told}
        yield {"type": "end", "calls": len(self.calls)}

    # Ledger

    def write(self) -> None:
        """Begin the record."""
        self.record.begin(copy(self.head))

    def restore(self, steps: Iterable[Step]) -> None:
        """Take the steps of a gateway before this one. Calls that were open end with the tokens that it has written."""
        for step in steps:
            self._take(step)
        for call in list(self.open.values()):
            if call.facts.ended is None:
                self._stop(call, "cut", "gateway_ended")
            else:
                self._settle(call)

    def _change(self, call: int | None, **fields: Any) -> None:
        self._note(Changed(call, fields))

    def _note(self, step: Step) -> None:
        """Take a step, and have it written."""
        self._take(step)
        self.record.add(step)

    def _take(self, step: Step) -> None:
        self.used_at = time.monotonic()
        match step:
            case Facts():
                self.calls.append(Call(copy(step)))
                self.open[step.call] = self.calls[-1]
                self._is_idle.clear()
                self.num_bytes += self.calls[-1].num_bytes
                if step.prompt_tokens:
                    self._asked[step.parent, step.prompt_token_ids].append(step.call)
            case Grown():
                self.calls[step.call].take(step)
            case Changed():
                changing = self.head if step.call is None else self.calls[step.call].facts
                for name, value in step.fields.items():
                    setattr(changing, name, value)
            case Media():
                self._media[step.id] = step
                self.num_bytes += len(step.data)
