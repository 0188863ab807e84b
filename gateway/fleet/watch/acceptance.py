"""The acceptance of one draft: the share of its tokens that the target takes, before and after weight updates."""

from collections import deque
from dataclasses import dataclass

WINDOW_S = 60.0
ENOUGH_TOKENS = 1000
"""Draft tokens that make a share: with fewer it says more of the prompts than of the draft."""


@dataclass(frozen=True, slots=True)
class Share:
    """A share of 0 to 1 that was measured while the target held `version`."""

    share: float
    version: int


@dataclass(frozen=True, slots=True)
class _Count:
    at: float
    drafted: float
    accepted: float


class Acceptance:
    """Follows the counters of one engine.

    `reference` is the best share of a version, until a later version falls below `alarm` of it and takes its place:
    each further fall by as much is reported too, and a slow decline over many updates is one.
    """

    def __init__(self, alarm: float) -> None:
        self._alarm = alarm
        self._counts: deque[_Count] = deque()
        self._version: int | None = None
        self.reference: Share | None = None

    @property
    def share(self) -> float | None:
        """The share over the last minute, or longer for enough tokens; None before enough tokens with this version."""
        drafted = self._drafted()
        if drafted < ENOUGH_TOKENS:
            return None
        return (self._counts[-1].accepted - self._counts[0].accepted) / drafted

    def see(self, at: float, drafted: float, accepted: float, version: int) -> tuple[Share, Share] | None:
        """Take the counters at a time in seconds; return the shares before and after a fall that they show."""
        if version != self._version or (self._counts and drafted < self._counts[-1].drafted):
            self._counts.clear()
            self._version = version
        self._counts.append(_Count(at, drafted, accepted))
        while len(self._counts) > 1 and self._counts[1].at <= at - WINDOW_S and self._drafted(1) >= ENOUGH_TOKENS:
            self._counts.popleft()
        return self._compare(version)

    def _compare(self, version: int) -> tuple[Share, Share] | None:
        if self.share is None:
            return None
        now, before = Share(self.share, version), self.reference
        if before is None or now.share > before.share or version == before.version:
            self.reference = now
        elif now.share < self._alarm * before.share:
            self.reference = now
            return before, now
        return None

    def _drafted(self, first: int = 0) -> float:
        return self._counts[-1].drafted - self._counts[first].drafted if len(self._counts) > first else 0.0
