"""One replica as the gateway sees it: what it holds and what it has in flight. Its state is changed by `fleet.py`."""

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakSet

from engines.engine import Engine
from engines.errors import EngineFailed, EngineUnreachable
from engines.types import ReplicaInfo, ReplicaState
from gateway.fleet.adapters import Adapter
from gateway.fleet.backoff import Backoff
from gateway.fleet.flight import Flight
from gateway.fleet.routing import Rollout

T = TypeVar("T")

# Samples in flight per sequence an engine can run: enough in its own queue that it never waits for us, little enough
# that the last rollouts of a batch go to whoever is free.
_OVERCOMMIT = 2
_NOT_THERE = (ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.SUSPECT, ReplicaState.LOST)


class Replica:
    """One replica as the gateway sees it. `weight_version` is None where its weights are unknown.

    A frozen one holds version 0, its checkpoint, for ever. `adapters` are those that its engine knows, by name; None
    is one that may be there and is not to be used. `transport` is what its engine receives over, once that has said so.
    `cuts_off` while an update has its engine end all that it has in flight. `is_stalled` while its tokens stand still.
    """

    def __init__(self, info: ReplicaInfo, engine: Engine, *, frozen: bool) -> None:
        self.info = info
        self.engine = engine
        self.frozen = frozen
        self.state = ReplicaState.STARTING
        self.weight_version: int | None = None
        self.transport = ""
        self.adapters: dict[str, Adapter | None] = {}
        self.load_tokens = 0
        self.load_samples = 0
        self.placed = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.listed = True
        self.is_leaving = False
        self.suspect_since: float | None = None
        self.reason = ""
        self._before_suspect, self._reason_before = ReplicaState.STARTING, ""
        self._calls: dict[asyncio.Timeout, asyncio.Task[object] | None] = {}
        self.cuts_off = False
        self.is_stalled = False
        self.backoff = Backoff()
        self._rollouts: dict[int, Rollout] = {}
        self._progress_at = time.monotonic()
        self._flights: WeakSet[Flight] = WeakSet()
        self._steady = asyncio.Event()
        self._steady.set()

    @property
    def replica_id(self) -> str:
        return self.info.replica_id

    @property
    def max_samples(self) -> int:
        return _OVERCOMMIT * self.info.max_num_seqs

    @property
    def can_serve(self) -> bool:
        return self.state is ReplicaState.SERVING

    @property
    def is_alive(self) -> bool:
        return self.state not in _NOT_THERE

    @property
    def quiet_s(self) -> float:
        """Seconds since the last sign that tokens are made."""
        return time.monotonic() - self._progress_at

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt in flight."""
        return max((rollout.prompt_tokens for rollout in self._rollouts.values()), default=0)

    def saw_progress(self) -> None:
        """Note a chunk, a reply, or another sign that tokens are made."""
        self._progress_at = time.monotonic()

    def holds(self, adapter: Adapter) -> bool:
        return self.adapters.get(adapter.name) is adapter

    @contextmanager
    def carrying(self, rollout: Rollout) -> Iterator[None]:
        """Counts a placed rollout out again at the end."""
        try:
            yield
        finally:
            self.load_tokens -= rollout.tokens
            self.load_samples -= rollout.n
            self._rollouts.pop(id(rollout), None)
            if self.load_samples == 0:
                self.idle.set()

    def reserve(self, rollout: Rollout) -> None:
        if self.load_samples == 0:
            self.saw_progress()
        self._rollouts[id(rollout)] = rollout
        self.load_tokens += rollout.tokens
        self.load_samples += rollout.n
        self.placed += rollout.n
        self.idle.clear()

    def take_off(self) -> Flight:
        """A request is sent now: what becomes of the weights under it."""
        flight = Flight(self.weight_version)
        self._flights.add(flight)
        return flight

    def hold(self, version: int, *, keeps_kv: bool) -> None:
        """It has taken `version`; what is in flight goes on over the KV that it has, or has it made anew."""
        if version == self.weight_version:
            return  # in a rolling update it took it before the commit
        self.weight_version = version
        for flight in self._flights:
            flight.meet(version, keeps_kv=keeps_kv)

    async def unless_lost(self, call: Awaitable[T]) -> T:
        """The call's result; `EngineUnreachable` as soon as the replica is given up, however long the call hangs."""
        if self.state is ReplicaState.LOST:  # its connections are closed, and a call would break on that
            if isinstance(call, Coroutine):
                call.close()
            raise EngineUnreachable(f"given up: {self.reason}", replica_id=self.replica_id)
        try:
            async with asyncio.timeout(None) as bound:
                self._calls[bound] = asyncio.current_task()
                return await call
        except TimeoutError as error:
            raise EngineUnreachable(f"given up: {self.reason}", replica_id=self.replica_id) from error
        finally:
            self._calls.pop(bound, None)

    async def vouched(self) -> None:
        """Returns once no update is under way: until its end nobody knows what made the tokens in flight.

        Raises `EngineFailed` where the update left weights of no known version: what they made is not delivered.
        """
        await self._steady.wait()
        if self.weight_version is None:
            raise EngineFailed(f"its tokens are of no known version: {self.reason}", replica_id=self.replica_id)

    def overwrite(self) -> None:
        """One that is UPDATING holds no known version from here on: what ends on it meanwhile waits for the verdict."""
        self.lose_version()
        self._steady.clear()

    def lose_version(self) -> None:
        """Nobody knows from here on which weights it holds."""
        self.weight_version = None

    def drop_calls(self) -> None:
        """End all calls in flight, as a loss does, but for the caller's own: what runs there is generated again
        elsewhere."""
        for call, task in self._calls.items():
            if task is not asyncio.current_task():
                call.reschedule(asyncio.get_running_loop().time())

    def enter(self, state: ReplicaState, reason: str) -> None:
        """Change state; `Fleet` calls this."""
        if state is ReplicaState.SUSPECT:
            self._before_suspect, self._reason_before = self.state, self.reason
            self.suspect_since = time.monotonic()
        elif self.state is ReplicaState.SUSPECT:
            self.suspect_since = None
        self.state, self.reason = state, reason
        if state is ReplicaState.UPDATING:
            # One that only leaves for an update knows what makes its last tokens, until `overwrite`.
            if self.weight_version is None:
                self._steady.clear()
        elif state is not ReplicaState.SUSPECT:
            self._steady.set()
        if state is ReplicaState.LOST:
            self.drop_calls()

    @property
    def state_before_suspect(self) -> ReplicaState:
        return self._before_suspect

    @property
    def reason_before_suspect(self) -> str:
        return self._reason_before
