"""One replica: its weights, its adapters and its rollouts in flight. `fleet.py` changes its state."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from engines.engine import Engine, Json
from engines.errors import EngineError, EngineOverwritten, EngineRefused, EngineUnreachable
from engines.types import EngineKind, ReplicaInfo, ReplicaState
from engines.weight_label import WeightLabel
from gateway.fleet.adapters import Adapter
from gateway.fleet.brake import Brake
from gateway.fleet.watch.evidence import Backoff, Evidence

T = TypeVar("T")

# Samples in flight for each sequence that an engine runs at once: enough that its queue never runs dry, few enough that
# the last rollouts of a batch go to a free replica.
_OVERCOMMIT = 2
_MOST_PLACED = 1 << 40
_READ_AT_ONCE = 6144
"""Tokens of rests that an engine reads at once: three quarters of a step of vLLM on a large GPU, in the time of about
ten steps without prompts."""
_TOLD_WITHIN_S, _SLOW_TOKENS_PER_S = 0.25, 5000
_SHARE_BESIDE_STANDBY = 0.25
"""Rests that an engine takes of another whose standby wakes, over its own rollouts. With all, the standby would have
nothing to do until they end."""
_ABORT = (EngineKind.EXTERNAL, EngineKind.SGLANG)  # by their owners, and where a grammar fails
_NOT_THERE = (ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.SUSPECT, ReplicaState.LOST)


class Work(Protocol):
    """The load of a rollout: tokens and samples that count with it, and the length of its prompt."""

    @property
    def tokens(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...


@dataclass(slots=True)
class Place:
    """An engine's place in its group: a successor takes the place, and so the label, of an engine that was lost.

    `restarts` counts the engines that were started again here after a loss."""

    number: int = 0
    replica_id: str = ""
    incarnation: str = ""
    restarts: int = 0

    def leave(self) -> None:
        """Free the place of an engine that was removed on purpose: the next one here is no restart of it."""
        self.replica_id, self.incarnation, self.restarts = "", "", 0


class Prompts:
    """The prompts of the rollouts in flight on a replica, and those among them that continue here and that its engine
    has yet to read: `_reading` tokens since it last had none."""

    def __init__(self) -> None:
        self._unread_samples = self._reading = 0
        self._most = math.inf
        self._in_flight: dict[int, Work] = {}
        self._unread: dict[int, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def longest(self) -> int:
        return max((rollout.prompt_tokens for rollout in self._in_flight.values()), default=0)

    def may_add(self, samples: int) -> bool:
        """False while an engine with `samples` in flight has enough rests to read, until it has read them all: with few
        at a time each of its steps would have prompts. It makes tokens alone while the first tokens come and the next
        rests go. So its own keep about half of their rate. One with no more of its own than to read gets all at once.
        False also where the rests are those of an engine whose standby wakes, and enough have been added."""
        may_read = self._reading < _READ_AT_ONCE or 2 * self._unread_samples >= samples
        return may_read and len(self._in_flight) < self._most

    def leave_rests(self, share: float) -> None:
        """Add few rests to those in flight, until `take_rests`: they are for a standby that wakes. With less than its
        `share` of all rollouts an engine would have nothing to do meanwhile."""
        self._most = max(share, (1 + _SHARE_BESIDE_STANDBY) * len(self._in_flight))

    def take_rests(self) -> None:
        self._most = math.inf

    @property
    def leaves_rests(self) -> bool:
        return self._most < math.inf

    def begin(self, rollout: Work) -> None:
        self._in_flight[id(rollout)] = rollout

    def reads(self, rollout: Work, then: Callable[[], None], tells_first_token: bool) -> None:
        """Count a rest as unread until its first tokens or its end, or for as long as a slow engine reads. `then` is
        called when others may be added."""
        self._unread[id(rollout)] = then
        self._unread_samples += rollout.n
        self._reading += rollout.prompt_tokens
        within_s = _TOLD_WITHIN_S + (self._reading / _SLOW_TOKENS_PER_S if tells_first_token else 0.0)
        asyncio.get_running_loop().call_later(within_s, self.has_read, rollout)

    def has_read(self, rollout: Work) -> None:
        if (then := self._unread.pop(id(rollout), None)) is not None:
            self._unread_samples -= rollout.n
            if not self._unread:
                self._reading = 0
                then()

    def end(self, rollout: Work) -> None:
        self._in_flight.pop(id(rollout), None)
        self.has_read(rollout)


class Flight:
    """One request on one replica, whose version is None where it is sent in an update.

    `Replica.hold` reports each version that the replica takes meanwhile. `versions` has all of them, oldest first. Any
    of them may have made any token: a token may arrive long after it was made.
    """

    def __init__(self, version: int | None, may_abort: bool = False) -> None:
        self.may_abort = may_abort  # an abort is its end, not that of its engine
        self.versions = [] if version is None else [version]
        self._kv = list(self.versions)

    def meet(self, version: int, *, keeps_kv: bool) -> None:
        """Note that the replica holds `version` from here on, and kept the request's KV or computes it again."""
        self.versions.append(version)
        self._kv = [*self._kv, version] if keeps_kv else [version]

    def kv_versions(self, spans: Sequence[Json]) -> list[int]:
        """Return the versions that wrote the KV under the last token of a choice, oldest first; several are a mixture.

        The choice's spans, if they have limits, say where it ended. An engine that kept the request waiting, or
        preempted it, computed its KV with newer weights than the oldest version here; the gateway does not know that.
        """
        if not spans or spans[-1]["end"] is None or self._kv == [spans[-1]["version"]]:
            return list(self._kv)
        last = spans[-1]["version"]
        return [version for version in self._kv if version <= last] or [last]


class Replica:
    """One replica. `weight_version` is None where its weights are unknown; a frozen replica always holds version 0.

    `found` is what its engine's label told when it joined. `adapters` has the adapters of its engine by name; None
    marks an adapter that may be there and must not be used. `evidence` has the signs of its life.
    `rank` orders replicas by their tokens in flight, equal ones by the samples that were placed on them.
    """

    def __init__(self, info: ReplicaInfo, engine: Engine, *, frozen: bool) -> None:
        self.info = info
        self.engine = engine
        self.frozen = frozen
        self.place = Place()
        self.state = ReplicaState.STARTING
        self.reason = ""
        self.is_leaving = False
        self.evidence = Evidence()
        self.brake = Brake(engine)
        self.weight_version: int | None = None
        self.found = WeightLabel()
        self.adapters: dict[str, Adapter | None] = {}
        self.load_tokens = 0
        self.load_samples = 0
        self.max_samples = _OVERCOMMIT * info.max_num_seqs
        self.rank = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.backoff = Backoff()
        self.prompts = Prompts()
        self._calls: set[_Call] = set()
        self._flights: dict[int, Flight] = {}  # by rollout
        self._steady = asyncio.Event()
        self._steady.set()

    @property
    def replica_id(self) -> str:
        return self.info.replica_id

    @property
    def label(self) -> str:
        """Group and slot: a name in metrics that a successor takes over."""
        return f"{self.info.group}-{self.place.number}"

    @property
    def can_serve(self) -> bool:
        return self.state is ReplicaState.SERVING

    @property
    def is_alive(self) -> bool:
        return self.state not in _NOT_THERE

    @property
    def placed(self) -> int:
        """Samples that were placed on it, in all."""
        return self.rank % _MOST_PLACED

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt in flight, or given up since the last sign that tokens are made."""
        return max(self.evidence.longest_given_up, self.prompts.longest)

    def has_place(self, rollout: Work) -> bool:
        """True if its engine has few enough samples."""
        return self.load_samples + rollout.n <= self.max_samples

    def holds(self, adapter: Adapter) -> bool:
        return self.adapters.get(adapter.name) is adapter

    def release(self, rollout: Work, error: BaseException | None) -> None:
        """Take off a placed rollout's load; the error ended its attempt."""
        if error is not None and not isinstance(error, EngineRefused):  # else nobody has read this prompt
            evidence = self.evidence
            evidence.longest_given_up = max(evidence.longest_given_up, rollout.prompt_tokens)
        self.prompts.end(rollout)
        self._flights.pop(id(rollout), None)
        self.load_tokens -= rollout.tokens
        self.load_samples -= rollout.n
        self.rank -= rollout.tokens * _MOST_PLACED
        if self.load_samples == 0:
            self.evidence.has_no_load()
            self.idle.set()

    def reserve(self, rollout: Work) -> None:
        self.evidence.has_load()
        self.prompts.begin(rollout)
        self.load_tokens += rollout.tokens
        self.load_samples += rollout.n
        self.rank += rollout.tokens * _MOST_PLACED + rollout.n
        self.idle.clear()

    def heard(self, rollout: Work) -> None:
        """Note that tokens of a rollout have come."""
        self.evidence.saw_progress()
        self.prompts.has_read(rollout)

    def take_off(self, rollout: Work) -> Flight:
        """Start the record of the weight versions of a request that is sent now, until `release`."""
        self._flights[id(rollout)] = flight = Flight(self.weight_version, self.info.kind in _ABORT)
        return flight

    def expect_aborts(self) -> None:
        """Take an abort of a request in flight for its end, as a trainer's pause asks for what it has."""
        for flight in self._flights.values():
            flight.may_abort = True

    def hold(self, version: int, *, keeps_kv: bool) -> None:
        """Take `version`. Requests in flight keep their KV, or the engine computes it again."""
        self.weight_version = version
        for flight in self._flights.values():
            flight.meet(version, keeps_kv=keeps_kv)

    async def unless_lost(self, call: Awaitable[T], *, is_control: bool = False) -> T:
        """Return the call's result. Raise `EngineUnreachable` once the replica is LOST, even if the call hangs.

        A rollout's call, which no `is_control` is, also ends once the replica's rollouts are dropped, with
        `EngineOverwritten` where an update is the reason.
        """
        if self.state is ReplicaState.LOST:  # its connections are closed
            if isinstance(call, Coroutine):
                call.close()
            raise EngineUnreachable(f"given up: {self.reason}", replica_id=self.replica_id)
        task = asyncio.current_task()
        assert task is not None
        under_way, others = _Call(task, is_control), task.cancelling()
        self._calls.add(under_way)
        try:
            return await call
        except asyncio.CancelledError as error:
            if not under_way.is_dropped or task.cancelling() > others + 1:  # the task itself was cancelled
                raise
            kind = EngineOverwritten if under_way.is_overwritten else EngineUnreachable
            raise kind(f"given up: {self.reason}", replica_id=self.replica_id) from error
        finally:
            self._calls.discard(under_way)
            if under_way.is_dropped:
                task.uncancel()

    async def vouched(self) -> None:
        """Return once `is_vouched`."""
        await self._steady.wait()
        assert self.is_vouched

    @property
    def is_vouched(self) -> bool:
        """False while an update overwrites the replica: until its end the version of its tokens is unknown.

        Raise `EngineOverwritten` where the update left no known version: such tokens are not delivered.
        """
        if not self._steady.is_set():
            return False
        if self.weight_version is None:
            raise EngineOverwritten(f"its tokens are of no known version: {self.reason}", replica_id=self.replica_id)
        return True

    def is_cut_off(self, error: EngineError) -> bool:
        """Return True where the engine was lost as an update overwrote it. SGLang dies of weights with NaN."""
        return self.weight_version is None and isinstance(error, EngineUnreachable)

    def lose_version(self) -> None:
        """Forget the version: the weights are unknown."""
        self.weight_version = None

    def drop_calls(self, *, rollouts_alone: bool = False) -> None:
        """End all calls in flight except the caller's, as a loss does: rollouts are generated again elsewhere.

        With `rollouts_alone` control calls go on, such as a trainer's pause: an update ends the rollouts, for which
        the engine is not at fault. A call that was dropped before may take a while to end.
        """
        for call in self._calls:
            goes_on = rollouts_alone and call.is_control
            if call.task is not asyncio.current_task() and not goes_on and not call.is_dropped:
                call.is_dropped, call.is_overwritten = True, rollouts_alone
                call.task.cancel()

    def enter(self, state: ReplicaState, reason: str) -> None:
        """Change the state. Only `Fleet` calls this."""
        self.evidence.entered(state, (self.state, self.reason))
        self.state, self.reason = state, reason
        if state is ReplicaState.UPDATING:
            self._steady.clear()
        elif state is not ReplicaState.SUSPECT:
            self._steady.set()
        if state is ReplicaState.LOST:
            self.drop_calls()


@dataclass(slots=True, eq=False)
class _Call:
    """A call in flight. `is_dropped` once it is ended from here, `is_overwritten` where an update does."""

    task: asyncio.Task[Any]
    is_control: bool
    is_dropped: bool = False
    is_overwritten: bool = False
