"""The rollouts of one model that wait for a replica, kept by what they demand of it."""

import asyncio
import heapq
import math
import time
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.fleet.adapters import Adapter
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica

Order = tuple[int, int, float, int]
_FORGET_ABOVE = 10_000


class Demand(NamedTuple):
    """A rollout's requirements on replicas; rollouts of equal demand can go to the same replicas."""

    adapter: Adapter | None
    min_version: int
    max_staleness: int | None
    needs_route: str


@dataclass(eq=False, slots=True)
class Queue:
    """The rollouts in line of one demand. `moved_at` is the monotonic time of the last placement."""

    demand: Demand
    entries: list[tuple[Order, "Waiter"]] = field(default_factory=list)
    """A heap. No two orders are equal, so waiters are never compared."""
    moved_at: float = -math.inf


@dataclass(eq=False, slots=True)
class Waiter:
    """A rollout that waits. `order` is its turn: rests first, then requests in turns, and of one turn
    the longest, where a rollout of unknown length is as long as any. Of rests the shortest is first: it is read
    soonest, and has the most to make."""

    rollout: Rollout
    queue: Queue
    order: Order
    began: float
    """Monotonic."""
    placed: "asyncio.Future[Replica]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Cancelled once its client has left."""

    @property
    def quiet_s(self) -> float:
        """Seconds of its wait since a rollout of the same demand was placed."""
        return time.monotonic() - max(self.began, self.queue.moved_at)


class WaitingLine:
    """Requests take turns: a request with one prompt does not wait behind all prompts of another.

    Each prompt gets a turn number, one more than the last of its request, and at least that of the prompt placed last.
    """

    def __init__(self) -> None:
        self._queues: dict[Demand, Queue] = {}
        self._by_rollout: dict[int, Waiter] = {}
        self._sizes: Counter[int] = Counter()
        self._last_turns: dict[str, int] = {}
        self._turn = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._by_rollout)

    @property
    def least_samples(self) -> int:
        """The samples of the smallest rollout in line."""
        return min(self._sizes)

    @property
    def samples(self) -> int:
        return sum(n * number for n, number in self._sizes.items())

    def waiters(self) -> list[Waiter]:
        return list(self._by_rollout.values())

    def add(self, rollout: Rollout) -> Waiter:
        """Put a rollout in line.

        Length orders the rollouts of one turn alone. No rollout joins a turn of which one was placed, so none starves.
        """
        self._arrivals += 1
        if rollout.moves:
            order: Order = (0, 0, rollout.prompt_tokens, -self._arrivals)
        else:
            request = rollout.request or rollout.request_id
            turn = max(self._turn, self._last_turns.get(request, 0)) + 1
            self._last_turns[request] = turn
            order = (1, turn, rollout.rank, self._arrivals)
        demand = Demand(rollout.adapter, rollout.min_version, rollout.max_staleness, rollout.needs_route)
        queue = self._queues.get(demand)
        if queue is None:
            queue = self._queues[demand] = Queue(demand)
        waiter = Waiter(rollout, queue, order, time.monotonic())
        self._by_rollout[id(rollout)] = waiter
        self._sizes[rollout.n] += 1
        heapq.heappush(queue.entries, (order, waiter))
        return waiter

    def done(self, waiter: Waiter) -> None:
        """The waiter was placed or has given up; its entry in the heap is dropped when it comes up."""
        if self._by_rollout.pop(id(waiter.rollout), None) is not None:
            self._sizes[waiter.rollout.n] -= 1
            if not self._sizes[waiter.rollout.n]:
                del self._sizes[waiter.rollout.n]
        if not self._by_rollout:
            self._last_turns.clear()
            self._queues.clear()

    def place(self, waiter: Waiter, replica: Replica) -> None:
        """Give a waiter its replica."""
        self.done(waiter)
        waiter.placed.set_result(replica)
        waiter.queue.moved_at = time.monotonic()
        self._turn = max(self._turn, waiter.order[1])
        if len(self._last_turns) > _FORGET_ABOVE:
            self._last_turns = {request: turn for request, turn in self._last_turns.items() if turn > self._turn}

    def in_turn(self, skipped: Container[Queue]) -> Iterator[Waiter]:
        """Waiters of all demands in the order of their turns, but for the demands that the caller has skipped."""
        heads = [(queue.entries[0], queue) for queue in self._queues.values() if queue.entries]
        heapq.heapify(heads)
        kept: list[tuple[Order, Waiter]] = []
        try:
            while heads:
                _, queue = heapq.heappop(heads)
                if not queue.entries:
                    continue
                entry = heapq.heappop(queue.entries)
                if not entry[1].placed.done():
                    kept.append(entry)
                    yield entry[1]
                if queue.entries and queue not in skipped:
                    heapq.heappush(heads, (queue.entries[0], queue))
        finally:
            for entry in kept:
                if not entry[1].placed.done():
                    heapq.heappush(entry[1].queue.entries, entry)


class SchedulingPass:
    """Replicas by demand. Their room only shrinks in a pass, so each demand looks for it once.

    `able` are those that may take a rollout. `reserved` have rests to read, or wait for a rollout that needs more room,
    and take no other.
    `rests_wait` are demands whose rests wait to be read, `least` the samples for which open replicas have room.
    """

    def __init__(self) -> None:
        self.able: dict[Queue, Sequence[Replica]] = {}
        self.reserved: set[Replica] = set()
        self.rests_wait: set[Queue] = set()
        self._open: dict[Queue, list[Replica]] = {}
        self.least = 1

    def need(self, samples: int) -> None:
        """Close the replicas without room for so many samples, which are no fewer than before."""
        if samples != self.least:
            self.least = samples
            self._close()

    def open_for(self, queue: Queue) -> list[Replica]:
        """Return the replicas with room that may take a rollout."""
        open_ = self._open.get(queue)
        if open_ is None:
            least, reserved = self.least, self.reserved
            open_ = self._open[queue] = [
                one
                for one in self.able[queue]
                if (not one.load_samples or one.load_samples + least <= one.max_samples) and one not in reserved
            ]
        return open_

    def reserve(self, *replicas: Replica) -> None:
        self.reserved.update(replicas)
        self._close()

    def took(self, replica: Replica) -> None:
        """Close a replica that has taken a rollout if it has no more room."""
        if not self._is_open(replica):
            for open_ in self._open.values():
                if replica in open_:
                    open_.remove(replica)

    def _close(self) -> None:
        self._open = {queue: list(filter(self._is_open, open_)) for queue, open_ in self._open.items()}

    def _is_open(self, replica: Replica) -> bool:
        has_room = not replica.load_samples or replica.load_samples + self.least <= replica.max_samples
        return has_room and replica not in self.reserved
