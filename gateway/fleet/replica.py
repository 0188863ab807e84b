"""One replica: its weights, its adapters and its rollouts in flight. `fleet.py` changes its state."""

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakSet

from engines.engine import Engine
from engines.errors import EngineError, EngineFailed, EngineOverwritten, EngineRefused, EngineUnreachable
from engines.types import ReplicaInfo, ReplicaState
from engines.weight_label import WeightLabel
from gateway.fleet.adapters import Adapter
from gateway.fleet.brake import Brake
from gateway.fleet.changes import Argument, Changes
from gateway.fleet.flight import Flight
from gateway.fleet.placement.backoff import Backoff
from gateway.fleet.placement.residents import Residents
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.watch.quiet_clock import QuietClock

T = TypeVar("T")

# Samples in flight for each sequence that an engine runs at once: enough that its queue never runs dry, few enough that
# the last rollouts of a batch go to a free replica.
_OVERCOMMIT = 2
_MOST_PLACED = 1 << 40
_NOT_THERE = (ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.SUSPECT, ReplicaState.LOST)


class Replica:
    """One replica. `weight_version` is None where its weights are unknown; a frozen replica always holds version 0.

    `was_unknown` is True where an update has overwritten weights of no known version, such as refused ones.
    `found` is what its engine's label told when it joined. `adapters` has the adapters of its engine by name; None
    marks an adapter that may be there and must not be used. `transport` is its engine's transfer backend, once known.
    `cuts_off` is True while an update ends all rollouts in flight. `is_stalled` is True while its tokens stand still,
    `is_gone` once a probe found nothing on its port, `is_silent` once a probe had no answer in time. `answered_at` is
    the monotonic time of its last good probe or token.
    `changes` tells those who keep a copy of it what happens to it. `rank` orders replicas by their tokens in flight,
    equal ones by the samples that were placed on them.
    """

    def __init__(self, info: ReplicaInfo, engine: Engine, *, frozen: bool, changes: Changes | None = None) -> None:
        self.changes = changes or Changes()
        self.info = info
        self.engine = engine
        self.frozen = frozen
        self.slot = 0
        self.restarts = 0
        self.state = ReplicaState.STARTING
        self.weight_version: int | None = None
        self.was_unknown = False
        self.found = WeightLabel()
        self.transport = ""
        self.adapters: dict[str, Adapter | None] = {}
        self.load_tokens = 0
        self.load_samples = 0
        self.max_samples = _OVERCOMMIT * info.max_num_seqs
        self.placed = 0
        self.rank = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.listed = True
        self.is_leaving = False
        self.suspect_since: float | None = None
        self.answered_at = time.monotonic()
        self.reason = ""
        self.state_before_suspect, self.reason_before_suspect = ReplicaState.STARTING, ""
        self._calls: dict[asyncio.Timeout, _Call] = {}
        self.cuts_off = False
        self.is_stalled = False
        self.is_gone = False
        self.is_silent = False
        self.backoff = Backoff()
        self.residents = Residents()
        self._rollouts: dict[int, Rollout] = {}
        self._awaited_chunks = 0
        self._awaited_elsewhere: dict[object, int] = {}
        self._quiet = QuietClock()
        self._longest_given_up = 0
        self._flights: WeakSet[Flight] = WeakSet()
        self.brake = Brake(engine)
        self._steady = asyncio.Event()
        self._steady.set()

    @property
    def replica_id(self) -> str:
        return self.info.replica_id

    @property
    def label(self) -> str:
        """Group and slot: a name in metrics that a successor takes over."""
        return f"{self.info.group}-{self.slot}"

    @property
    def can_serve(self) -> bool:
        return self.state is ReplicaState.SERVING

    @property
    def is_alive(self) -> bool:
        return self.state not in _NOT_THERE

    @property
    def quiet_s(self) -> float:
        """Seconds under load since the last sign that tokens are made; times without load do not count."""
        return self._quiet.seconds

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt in flight, or given up since the last sign that tokens are made."""
        in_flight = (rollout.prompt_tokens for rollout in self._rollouts.values())
        return max(self._longest_given_up, max(in_flight, default=0))

    @property
    def awaits_chunks(self) -> bool:
        """True if each rollout in flight waits for a chunk now: none is read whole, or held up by its client."""
        return self._awaited_chunks + sum(self._awaited_elsewhere.values()) >= len(self._rollouts) > 0

    @contextmanager
    def awaiting_chunk(self) -> Iterator[None]:
        """Note that a rollout waits for a chunk during the block."""
        self._awaited_chunks += 1
        try:
            yield
        finally:
            self._awaited_chunks -= 1

    @property
    def awaited_chunks(self) -> int:
        """Rollouts of this process that wait for a chunk now."""
        return self._awaited_chunks

    def await_elsewhere(self, process: object, rollouts: int) -> None:
        """Note how many rollouts of another process wait for a chunk now."""
        self._awaited_elsewhere[process] = rollouts

    def saw_progress(self) -> None:
        """Note a chunk, a reply, or another sign that tokens are made."""
        self.answered_at = time.monotonic()
        self.excuse()

    def excuse(self) -> None:
        """Begin the time of a standstill again: tokens are made, or the engine is held."""
        self._quiet.restart()
        self._longest_given_up = 0

    def holds(self, adapter: Adapter) -> bool:
        return self.adapters.get(adapter.name) is adapter

    def carrying(self, rollout: Rollout) -> AbstractContextManager[None]:
        """Release a placed rollout's load at the end of the block."""
        return _Carried(self, rollout)

    def release(self, rollout: Rollout, error: BaseException | None) -> None:
        """Take off a placed rollout's load; the error ended its attempt."""
        if error is not None and not isinstance(error, EngineRefused):  # else nobody has read this prompt
            self._longest_given_up = max(self._longest_given_up, rollout.prompt_tokens)
        self._add_load(-rollout.tokens, -rollout.n)
        self._rollouts.pop(id(rollout), None)
        if self.load_samples == 0:
            self._quiet.stop()
            self.idle.set()

    def reserve(self, rollout: Rollout) -> None:
        self._quiet.run()
        self._rollouts[id(rollout)] = rollout
        self.placed += rollout.n
        self._add_load(rollout.tokens, rollout.n)
        self.idle.clear()

    def _add_load(self, tokens: int, samples: int) -> None:
        self.load_tokens += tokens
        self.load_samples += samples
        self.rank = self.load_tokens * _MOST_PLACED + self.placed

    def take_off(self) -> Flight:
        """Start the record of the weight versions of a request that is sent now."""
        flight = Flight(self.weight_version)
        self._flights.add(flight)
        return flight

    def hold(self, version: int, *, keeps_kv: bool) -> None:
        """Take `version`. Requests in flight keep their KV, or the engine computes it again."""
        if version == self.weight_version:
            return  # taken before the commit, in a rolling update
        self._tell("hold", version, keeps_kv)
        self.weight_version = version
        for flight in self._flights:
            flight.meet(version, keeps_kv=keeps_kv)

    def _tell(self, change: str, *arguments: Argument) -> None:
        self.changes.changed(self, change, *arguments)

    async def unless_lost(self, call: Awaitable[T], *, is_control: bool = False) -> T:
        """Return the call's result. Raise `EngineUnreachable` once the replica is LOST, even if the call hangs.

        A rollout's call, which no `is_control` is, also ends once the replica's rollouts are dropped, with
        `EngineOverwritten` where an update is the reason.
        """
        if self.state is ReplicaState.LOST:  # its connections are closed
            if isinstance(call, Coroutine):
                call.close()
            raise EngineUnreachable(f"given up: {self.reason}", replica_id=self.replica_id)
        try:
            async with asyncio.timeout(None) as bound:
                self._calls[bound] = _Call(asyncio.current_task(), is_control)
                return await call
        except TimeoutError as error:
            kind = EngineOverwritten if self._calls[bound].is_overwritten else EngineUnreachable
            raise kind(f"given up: {self.reason}", replica_id=self.replica_id) from error
        finally:
            self._calls.pop(bound, None)

    async def vouched(self) -> None:
        """Return once no update overwrites the replica: until then the version of its tokens is unknown.

        Raise `EngineOverwritten` where the update left no known version: such tokens are not delivered.
        """
        await self._steady.wait()
        if self.weight_version is None:
            raise EngineOverwritten(f"its tokens are of no known version: {self.reason}", replica_id=self.replica_id)

    def is_cut_off(self, error: EngineError) -> bool:
        """Return True where an update has ended an attempt with the error: it ends all rollouts, or the engine was lost
        as it was overwritten. SGLang dies of weights with NaN."""
        return self.cuts_off or (self.weight_version is None and isinstance(error, EngineUnreachable))

    async def answering(self, call: Awaitable[T]) -> T:
        """Return the call's result. An error that the engine answers while an update overwrites it waits for the
        verdict: weights that are refused may be its cause, as NaN is of vLLM's 400, and it is `EngineOverwritten` then.
        """
        try:
            return await call
        except (EngineRefused, EngineFailed):
            await self.unless_lost(self.vouched())
            raise

    def overwrite(self) -> None:
        """Forget the version: rollouts that end from here on wait for the verdict in `vouched`."""
        self._tell("overwrite")
        self.was_unknown = self.weight_version is None
        self.lose_version()
        self._steady.clear()

    def lose_version(self) -> None:
        """Forget the version: the weights are unknown."""
        self._tell("lose_version")
        self.weight_version = None

    def cut_off(self, *, is_on: bool) -> None:
        """Note whether an update ends all rollouts in flight."""
        self.cuts_off = is_on
        self._tell("cut_off", is_on)

    def drop_calls(self, *, rollouts_alone: bool = False) -> None:
        """End all calls in flight except the caller's, as a loss does: rollouts are generated again elsewhere.

        With `rollouts_alone` control calls go on, such as a trainer's pause: an update ends the rollouts, for which
        the engine is not at fault. A call that was dropped before may take a while to end.
        """
        self._tell("drop_calls", rollouts_alone)
        for bound, call in self._calls.items():
            goes_on = rollouts_alone and call.is_control
            if call.task is not asyncio.current_task() and not goes_on and not bound.expired():
                call.is_overwritten |= rollouts_alone
                bound.reschedule(asyncio.get_running_loop().time())

    def enter(self, state: ReplicaState, reason: str) -> None:
        """Change the state. Only `Fleet` calls this."""
        self._tell("enter", state, reason)
        if state is ReplicaState.SUSPECT:
            self.state_before_suspect, self.reason_before_suspect = self.state, self.reason
            self.suspect_since = time.monotonic()
        elif self.state is ReplicaState.SUSPECT:
            self.suspect_since = None
        self.state, self.reason = state, reason
        if state is ReplicaState.UPDATING:
            # A replica that leaves for a rolling update knows its version until `overwrite`.
            if self.weight_version is None:
                self._steady.clear()
        elif state is not ReplicaState.SUSPECT:
            self._steady.set()
        if state is ReplicaState.LOST:
            self.drop_calls()


@dataclass(slots=True)
class _Call:
    """A call in flight. `is_overwritten` once an update has ended it."""

    task: asyncio.Task[object] | None
    is_control: bool
    is_overwritten: bool = False


class _Carried:
    """A placed rollout on its replica, until the end of the block."""

    __slots__ = ("_replica", "_rollout")

    def __init__(self, replica: Replica, rollout: Rollout) -> None:
        self._replica, self._rollout = replica, rollout

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._replica.release(self._rollout, error)
