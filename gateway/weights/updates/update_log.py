"""Ended updates, newest first: kept for the status page, logged once, counted in metrics."""

from collections import deque

import structlog

from engines.engine import Json
from gateway.fleet.metrics import Metrics
from gateway.weights.updates.record import Phase, WeightUpdate

log = structlog.get_logger()

KEPT = 100


class UpdateLog:
    """Records of the last updates since the gateway started."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._updates: deque[WeightUpdate] = deque(maxlen=KEPT)

    @property
    def last(self) -> WeightUpdate | None:
        return self._updates[0] if self._updates else None

    @property
    def last_committed(self) -> WeightUpdate | None:
        return next((update for update in self._updates if update.phase is Phase.COMMITTED), None)

    def reports(self) -> list[Json]:
        return [update.report() for update in self._updates]

    def add(self, update: WeightUpdate) -> None:
        """Adds an update that has just ended."""
        self._updates.appendleft(update)
        report = update.report()
        self._metrics.weight_updates.labels(report["end"]).inc()
        self._metrics.weight_update_bytes.inc(update.num_bytes)
        for step, seconds in (*update.seconds.items(), ("whole", update.age_s)):
            self._metrics.weight_update_seconds.labels(step).observe(seconds)
        for replica in update.replicas.values():
            if "away_s" in replica:
                self._metrics.weight_update_seconds.labels("away").observe(replica["away_s"])
            self._metrics.canaries.labels((replica.get("canary") or {}).get("result", "not asked")).inc()
        write = log.info if not update.error else log.error
        del report["phase"], report["started"]
        write("weight update", **report)
