"""The causes for which rollouts wait, and the time of each."""

import time
from collections import defaultdict
from collections.abc import Mapping
from enum import StrEnum


class Cause(StrEnum):
    """The lack for which a rollout waits."""

    GATE = "gate"  # closed by an update or a pause
    REPLICA = "replica"  # none that serves, and can do what is asked
    VERSION = "version"  # none with weights as new as demanded
    ROOM = "room"  # each that may take it has enough samples
    KV = "kv"  # that other sessions hold


class Waits:
    """The causes for which rollouts of one demand have waited, in seconds that only grow."""

    def __init__(self) -> None:
        self.cause = Cause.ROOM
        self._since = time.monotonic()
        self._seconds: defaultdict[Cause, float] = defaultdict(float)

    def lack(self, cause: Cause) -> None:
        """Note the cause from now on."""
        self._count()
        self.cause = cause

    def read(self) -> Mapping[Cause, float]:
        """Return the seconds up to now by cause."""
        self._count()
        return dict(self._seconds)

    def _count(self) -> None:
        now = time.monotonic()
        self._seconds[self.cause] += now - self._since
        self._since = now
