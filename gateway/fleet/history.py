"""What has happened to the fleet, for people: its last events, and the states of replicas over the last minutes."""

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engines.engine import Json
from engines.types import ReplicaState
from gateway.fleet.replica import Replica

KEPT_EVENTS = 100
KEPT_UPDATES = 3
KEPT_S = 600.0


class Events:
    """The last hundred events, and beside them the last three committed updates, whose number would push a death out of
    sight. The log has all of them."""

    def __init__(self) -> None:
        self._kept = {False: deque[Json](maxlen=KEPT_EVENTS), True: deque[Json](maxlen=KEPT_UPDATES)}

    def add(self, subject: str, text: str, *, is_routine: bool = False) -> None:
        """Note an event; `subject` is a replica's id, or the name of what changed. A commit is routine."""
        self._kept[is_routine].append({"at": round(time.time(), 3), "subject": subject, "text": text})

    @property
    def last(self) -> list[Json]:
        """The events, oldest first."""
        return sorted(itertools.chain(*self._kept.values()), key=lambda event: event["at"])


class Watched(Protocol):
    """The part of the fleet that a timeline sees."""

    @property
    def replicas(self) -> Sequence[Replica]: ...
    def on_change(self, listener: Callable[[], None]) -> None: ...


@dataclass(slots=True)
class _Run:
    """One replica in one state with one version, from `begun` on."""

    begun: float
    what: tuple[str, ReplicaState, int | None]
    ended: float | None = None


class Timeline:
    """States and weight versions of each replica, by its label, as runs without a gap. `now` is the time of day."""

    def __init__(self, fleet: Watched, now: Callable[[], float] = time.time) -> None:
        self._fleet = fleet
        self._now = now
        self._runs: defaultdict[str, deque[_Run]] = defaultdict(deque)
        fleet.on_change(self.look)

    def look(self) -> None:
        """Note the replicas as they are; a label without a replica ends its run."""
        now = self._now()
        there = {one.label: (one.replica_id, one.state, one.weight_version) for one in self._fleet.replicas}
        for label in [*self._runs.keys() | there.keys()]:
            runs, what = self._runs[label], there.get(label)
            if runs and runs[-1].ended is None and runs[-1].what != what:
                runs[-1].ended = now
            if what is not None and (not runs or runs[-1].ended is not None):
                runs.append(_Run(now, what))
            while runs and runs[0].ended is not None and runs[0].ended < now - KEPT_S:
                runs.popleft()
            if not runs:
                del self._runs[label]

    def report(self) -> list[Json]:
        """Return the runs by label. A run that goes on has no end."""
        self.look()
        return [
            {"replica": label, "runs": [[run.begun, run.ended, *run.what[1:]] for run in runs]}
            for label, runs in sorted(self._runs.items())
        ]
