"""Counts delivered samples: how they ended, and how stale their tokens were."""

from collections.abc import Iterable, Sequence
from statistics import median

from engines.engine import Json
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics

# Larger distances share a label, so that their number is bounded.
_MOST_BEHIND = 8


class Deliveries:
    """Counts by model. Canaries and warm-ups never pass here, so they are no deliveries."""

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics

    def count(self, model: str, choices: Iterable[Json]) -> None:
        """Count the choices that end."""
        target = self._fleet.target_of(model)
        for choice in choices:
            if reason := choice.get("finish_reason"):
                self._metrics.completions.labels(model, reason).inc()
                self._count_tokens(model, target, choice.get("weight_versions") or ())

    def count_batch(self, model: str, seconds: Sequence[float]) -> None:
        """Count a batch by the times at which its prompts ended, from its start; one prompt is no batch."""
        if len(seconds) > 1:
            self._metrics.batch_seconds.labels(model).observe(max(seconds))
            self._metrics.batch_tail_ratio.labels(model).observe(max(seconds) / median(seconds))

    def _count_tokens(self, model: str, target: int, spans: Iterable[Json]) -> None:
        """A span without limits is of a request that met several versions; its engine does not say which made what."""
        for span in spans:
            start, end, version = span.get("start"), span.get("end"), span.get("base_version", span.get("version"))
            if start is not None and end is not None and version is not None:
                behind = min(max(0, target - int(version)), _MOST_BEHIND)
                self._metrics.delivered_tokens.labels(model, str(behind)).inc(end - start)
