"""The rollouts of one model that wait for a replica, kept by what they demand of it."""

import asyncio
import heapq
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field

from gateway.fleet.adapters import Adapter
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica

Order = tuple[int, int, int]
_FORGET_ABOVE = 10_000


@dataclass(frozen=True, slots=True)
class Demand:
    """A rollout's requirements on replicas; rollouts of equal demand can go to the same replicas."""

    adapter: Adapter | None
    min_version: int
    max_staleness: int | None
    needs_ids: bool
    needs_route: str

    @classmethod
    def of(cls, rollout: Rollout) -> "Demand":
        return cls(rollout.adapter, rollout.min_version, rollout.max_staleness, rollout.needs_ids, rollout.needs_route)


@dataclass(eq=False, slots=True)
class Waiter:
    """A rollout that waits. `order` is its turn: rests first, then requests in turns."""

    rollout: Rollout
    demand: Demand
    order: Order
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
        self._last_turns: dict[str, int] = {}
        self._turn = 0
        self._arrivals = 0
        self._moved_at: dict[Demand, float] = {}

    def __len__(self) -> int:
        return len(self._by_rollout)

    def waits(self, rollout: Rollout) -> bool:
        return id(rollout) in self._by_rollout

    def waiters(self) -> list[Waiter]:
        return list(self._by_rollout.values())

    def add(self, rollout: Rollout) -> Waiter:
        self._arrivals += 1
        if rollout.goes_on:
            order = (0, 0, -self._arrivals)
        else:
            request = rollout.request or rollout.request_id
            turn = max(self._turn, self._last_turns.get(request, 0)) + 1
            self._last_turns[request] = turn
            order = (1, turn, self._arrivals)
        waiter = Waiter(rollout, Demand.of(rollout), order)
        self._by_rollout[id(rollout)] = waiter
        heapq.heappush(self._by_demand[waiter.demand], waiter)
        return waiter

    def done(self, waiter: Waiter) -> None:
        """The waiter was placed or has given up; its entry in the heap is dropped when it comes up."""
        self._by_rollout.pop(id(waiter.rollout), None)
        if not self._by_rollout:
            self._last_turns.clear()
            self._by_demand.clear()

    def moved(self, waiter: Waiter) -> None:
        """The waiter is placed now."""
        self._moved_at[waiter.demand] = time.monotonic()
        self._turn = max(self._turn, waiter.order[1])
        if len(self._last_turns) > _FORGET_ABOVE:
            self._last_turns = {request: turn for request, turn in self._last_turns.items() if turn > self._turn}

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
