"""One pass over a line of waiting rollouts: the replicas that have room still."""

from collections.abc import Sequence

from gateway.fleet.placement.waiting import Queue
from gateway.fleet.replica import Replica


class SchedulingPass:
    """Replicas by demand. Their room only shrinks in a pass, so each demand looks for it once.

    `able` are those that may take a rollout. `reserved` wait for one that needs more room, and take no other.
    `rests_wait` has the demands whose rests wait for engines with enough to read.
    `least` are the samples for which open replicas have room.
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
            self._open = {queue: list(filter(self._is_open, open_)) for queue, open_ in self._open.items()}

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

    def reserve(self, replica: Replica) -> None:
        self.reserved.add(replica)
        self.took(replica)

    def took(self, replica: Replica) -> None:
        """Close a replica that has taken a rollout, or is reserved for one, if it has no more room."""
        if not self._is_open(replica):
            for open_ in self._open.values():
                if replica in open_:
                    open_.remove(replica)

    def _is_open(self, replica: Replica) -> bool:
        has_room = not replica.load_samples or replica.load_samples + self.least <= replica.max_samples
        return has_room and replica not in self.reserved
