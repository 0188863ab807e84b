"""Spares idle replicas probes: one whose process is known to live is looked at on every third occasion alone.

A closed connection ends the rest at the next occasion, and so does a rollout. The silence after which a probe is late
stays the same, since a later probe is given less time.
"""

import asyncio
import time

from engines.types import EngineKind
from gateway.config.schema import FleetConfig
from gateway.fleet.replica import Replica

_OCCASIONS = 3.5
# Of `fleet.probe_timeout_s`: an idle engine answers in milliseconds, and has the rest of the time for it.
_LONGEST_SHARE = 0.7
# Looks fall on so many moments of an interval: many replicas together cost less than one by one.
_MOMENTS = 8


class Rest:
    """Decides when a replica is to be probed."""

    def __init__(self, config: FleetConfig) -> None:
        self._interval_s, self._timeout_s = config.probe_interval_s, config.probe_timeout_s
        self._longest_s = min(_OCCASIONS * self._interval_s, _LONGEST_SHARE * self._timeout_s)

    async def ended(self, replica: Replica) -> None:
        """Return at the next occasion at which the replica does not rest.

        A timer looks, as a task that wakes to sleep again costs several times as much.
        """
        loop = asyncio.get_running_loop()
        is_due: asyncio.Future[None] = loop.create_future()
        timer: asyncio.TimerHandle

        def next_occasion() -> float:
            latest = loop.time() + self._interval_s
            return latest - latest % (self._interval_s / _MOMENTS)

        def look() -> None:
            nonlocal timer
            if self._goes_on(replica):
                timer = loop.call_at(next_occasion(), look)
            elif not is_due.done():
                is_due.set_result(None)

        timer = loop.call_at(next_occasion(), look)
        try:
            await is_due
        finally:
            timer.cancel()

    def patience_s(self, replica: Replica) -> float:
        """Return the longest wait for the probe of an idle replica: the less, the later it begins after a rest."""
        late_s = max(0.0, time.monotonic() - replica.evidence.answered_at - self._interval_s)
        return self._timeout_s - late_s if late_s <= self._longest_s else self._timeout_s

    def _goes_on(self, replica: Replica) -> bool:
        """An external server may be a proxy, whose connections say nothing of the engines behind it."""
        next_s = time.monotonic() - replica.evidence.answered_at + self._interval_s
        return (
            next_s <= self._longest_s
            and not replica.load_samples
            and replica.can_serve
            and replica.listed
            and replica.info.kind is not EngineKind.EXTERNAL
            and replica.engine.is_connected
        )
