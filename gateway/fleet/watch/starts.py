"""Starts of engines that are no replicas yet. Their Serve replicas tell them each second."""

import time
from collections.abc import Sequence

from engines.engine import Json
from engines.types import EngineStart, Phase

_NEWS_S = 5.0
"""A start that was not told again for so long has ended with its Serve replica."""


class Starts:
    """The starts that go on, in the order in which they were told first."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[EngineStart, float]] = {}

    def tell(self, start: EngineStart) -> None:
        self._told[start.replica_id] = start, time.monotonic()

    def end(self, replica_id: str) -> None:
        """Forget the start of an engine that has joined."""
        self._told.pop(replica_id, None)

    @property
    def now(self) -> list[EngineStart]:
        return [start for start, told_at in self._told.values() if time.monotonic() - told_at < _NEWS_S]

    @property
    def text(self) -> str:
        """A clause for each start, to follow other text; "" where no engine starts."""
        return "".join(f"; {words(start)}" for start in self.now)


def words(start: EngineStart) -> str:
    """Return the phase of a start and since when, for people."""
    now, (phase, since) = time.time(), start.phases[-1]
    return f"{start.replica_id} starts: {phase} for {now - since:.1f} s, {now - start.phases[0][1]:.1f} s in all"


def report(begun: Sequence[Phase], ended: float = 0.0) -> Json:
    """Return when a start began, and its seconds by phase up to its end, or now; the last phase is the one then."""
    ended = ended or time.time()
    ends = [*(since for _, since in begun[1:]), ended]
    seconds: Json = {}
    for (phase, since), end in zip(begun, ends, strict=True):
        seconds[phase] = round(seconds.pop(phase, 0.0) + end - since, 3)
    return {"began": begun[0][1], "seconds": round(ended - begun[0][1], 3), "phases": seconds}
