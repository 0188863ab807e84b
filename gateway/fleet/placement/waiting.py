"""The rollouts of one model that wait for a replica, kept by what they demand of it."""

import asyncio
import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace

from gateway.fleet.adapters import Adapter
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.waits import Cause, Waits
from gateway.fleet.replica import Replica

Order = tuple[int, int, int, float, int]
_FORGET_ABOVE = 10_000


@dataclass(frozen=True, slots=True)
class Demand:
    """A rollout's requirements on replicas; rollouts of equal demand can go to the same replicas."""

    adapter: Adapter | None
    min_version: int
    max_staleness: int | None
    needs_ids: bool
    needs_route: str
    is_outside: bool = False
    """True for turns of sessions that no replica holds, which wait for KV."""

    @classmethod
    def of(cls, rollout: Rollout, *, is_outside: bool) -> "Demand":
        return cls(
            rollout.adapter,
            rollout.min_version,
            rollout.max_staleness,
            rollout.needs_ids,
            rollout.needs_route,
            is_outside,
        )


@dataclass(eq=False, slots=True)
class Waiter:
    """A rollout that waits. `order` is its turn: rests first, then by priority, then requests in turns, and of one turn
    the longest, where a rollout of unknown length is as long as any."""

    rollout: Rollout
    demand: Demand
    order: Order
    before: Mapping[Cause, float] = field(default_factory=dict)
    """The waits of its demand when it came."""
    waited: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    """Its seconds in line by cause, once it has left, or has got another demand."""
    kept: Replica | None = None
    """The replica that was reserved for it at the last look."""
    why: str = ""
    """The reason for the replica that it was placed on."""
    placed: "asyncio.Future[Replica]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __lt__(self, other: "Waiter") -> bool:
        return self.order < other.order


class WaitingLine:
    """Requests take turns: a request with one prompt does not wait behind all prompts of another.

    Each prompt gets a turn number, one more than the last of its request, and at least that of the prompt placed last.
    """

    def __init__(self) -> None:
        self._by_demand: defaultdict[Demand, list[Waiter]] = defaultdict(list)
        self._by_rollout: dict[int, Waiter] = {}
        self._sizes: Counter[int] = Counter()
        self._last_turns: dict[str, int] = {}
        self._turn = 0
        self._arrivals = 0
        self._moved_at: dict[Demand, float] = {}
        self._waits: defaultdict[Demand, Waits] = defaultdict(Waits)

    def __len__(self) -> int:
        return len(self._by_rollout)

    @property
    def least_samples(self) -> int:
        """The samples of the smallest rollout in line."""
        return min(self._sizes)

    @property
    def is_short_of_kv(self) -> bool:
        """True where turns of sessions wait for KV."""
        return any(waits.cause is Cause.KV for waits in self._waits.values())

    def waiters(self) -> list[Waiter]:
        return list(self._by_rollout.values())

    def add(self, rollout: Rollout, *, is_outside: bool = False, has_begun: bool = False) -> Waiter:
        """Put a rollout in line. `is_outside` for a turn of a session that no replica holds, `has_begun` for one after
        the session's first.

        Length orders the rollouts of one turn alone. No rollout joins a turn of which one was placed, so none starves.
        """
        self._arrivals += 1
        if rollout.goes_on:
            order: Order = (0, rollout.priority, 0, 0.0, -self._arrivals)
        elif is_outside and has_begun:
            order = (0, rollout.priority, 1, 0.0, self._arrivals)
        else:
            request = rollout.request or rollout.request_id
            turn = max(self._turn, self._last_turns.get(request, 0)) + 1
            self._last_turns[request] = turn
            order = (1, rollout.priority, turn, rollout.rank, self._arrivals)
        waiter = Waiter(rollout, Demand.of(rollout, is_outside=is_outside), order)
        waiter.before = self._waits[waiter.demand].read()
        self._by_rollout[id(rollout)] = waiter
        self._sizes[rollout.n] += 1
        heapq.heappush(self._by_demand[waiter.demand], waiter)
        return waiter

    def done(self, waiter: Waiter) -> None:
        """The waiter was placed or has given up; its entry in the heap is dropped when it comes up."""
        if self._by_rollout.pop(id(waiter.rollout), None) is not None:
            self._count(waiter)
            self._sizes[waiter.rollout.n] -= 1
            if not self._sizes[waiter.rollout.n]:
                del self._sizes[waiter.rollout.n]
        if not self._by_rollout:
            self._waits.clear()
            self._moved_at.clear()
            self._last_turns.clear()
            self._by_demand.clear()

    def moved(self, waiter: Waiter) -> None:
        """The waiter is placed now."""
        self._moved_at[waiter.demand] = time.monotonic()
        self._turn = max(self._turn, waiter.order[2])
        if len(self._last_turns) > _FORGET_ABOVE:
            self._last_turns = {request: turn for request, turn in self._last_turns.items() if turn > self._turn}

    def held(self, waiter: Waiter) -> None:
        """The waiter, and those behind it, wait for KV that sessions hold: such time does not count, since each of
        these sessions has a turn or ends."""
        if not waiter.demand.is_outside:
            self._count(waiter)
            waiter.demand = replace(waiter.demand, is_outside=True)
            waiter.before = self._waits[waiter.demand].read()
        self._waits[waiter.demand].lack(Cause.KV)
        self._moved_at[waiter.demand] = time.monotonic()

    def lacks(self, demand: Demand, cause: Cause) -> None:
        """Note the cause for which rollouts of a demand wait from now on."""
        self._waits[demand].lack(cause)

    def lack_gate(self) -> None:
        """Note that all wait for the gate from now on."""
        for waits in self._waits.values():
            waits.lack(Cause.GATE)

    def _count(self, waiter: Waiter) -> None:
        for cause, seconds in self._waits[waiter.demand].read().items():
            waiter.waited[cause] += seconds - waiter.before.get(cause, 0.0)

    def quiet_s(self, waiter: Waiter, since: float) -> float:
        """Seconds in which no rollout of the same demand was placed, from `since` (monotonic) on."""
        return time.monotonic() - max(since, self._moved_at.get(waiter.demand, since))

    def in_turn(self) -> Generator[Waiter, bool]:
        """Waiters of all demands in the order of their turns. Send True for a demand that nobody can serve now."""
        heads = [(queue[0], demand) for demand, queue in self._by_demand.items() if queue]
        heapq.heapify(heads)
        kept: list[Waiter] = []
        try:
            while heads:
                _, demand = heapq.heappop(heads)
                queue = self._by_demand[demand]
                if not queue:
                    continue
                waiter = heapq.heappop(queue)
                skips = False
                if not waiter.placed.done():
                    kept.append(waiter)
                    skips = bool((yield waiter))
                if queue and not skips:
                    heapq.heappush(heads, (queue[0], demand))
        finally:
            for waiter in kept:
                if not waiter.placed.done():
                    heapq.heappush(self._by_demand[waiter.demand], waiter)
