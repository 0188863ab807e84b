"""The few numbers that matter, named once, and the engines' own pages with a `replica` label."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from engines.types import ReplicaState
from gateway.fleet import Replica

_SECONDS = (0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """One registry per gateway; seconds, bytes and counts, no label that grows with traffic."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = {"namespace": "rollout_gateway", "registry": self.registry}
        self.requests = Counter("requests", "Requests by route and status.", ["route", "status"], **own)
        self.request_seconds = Histogram(
            "request_seconds", "From the request's head to the reply's end.", ["route"], buckets=_SECONDS, **own
        )
        self.queue_seconds = Histogram("queue_seconds", "A rollout's wait for a replica.", buckets=_SECONDS, **own)
        self.retries = Counter("retries", "Rollouts begun again on another replica.", **own)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of delivered completions.", **own)
        self.completion_tokens = Counter("completion_tokens", "Tokens of delivered completions.", **own)
        self.weight_version = Gauge("weight_version", "The fleet's weight version.", **own)
        self.weight_updates = Counter("weight_updates", "Weight updates by end.", ["end"], **own)
        self.weight_update_seconds = Histogram(
            "weight_update_seconds", "Phases of an update.", ["phase"], buckets=_SECONDS, **own
        )
        self.replicas = Gauge("replicas", "Replicas by state.", ["state"], **own)
        self.samples_in_flight = Gauge("samples_in_flight", "Samples placed on a replica.", ["replica"], **own)
        self.queue_length = Gauge("queue_length", "Rollouts that wait for a replica.", **own)

    def observe(self, replicas: Iterable[Replica], *, queue_length: int) -> None:
        """Take the gauges' values, just before they are read."""
        replicas = list(replicas)
        for state in ReplicaState:
            self.replicas.labels(state).set(sum(replica.state is state for replica in replicas))
        self.samples_in_flight.clear()
        for replica in replicas:
            self.samples_in_flight.labels(replica.replica_id).set(replica.load_samples)
        self.queue_length.set(queue_length)

    def page(self, engine_pages: dict[str, str]) -> bytes:
        """Ours, then the engines'. `engine_pages` is Prometheus text by replica id."""
        engines = CollectorRegistry()
        engines.register(_Labelled(engine_pages))
        return generate_latest(self.registry) + generate_latest(engines)


class _Labelled:
    """Several engines' pages as one: equal families joined, each sample labelled with its replica."""

    def __init__(self, pages: dict[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica_id, page in self._pages.items():
            for family in _ours_excluded(text_string_to_metric_families(page)):
                joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    joined.samples.append(sample._replace(labels={**sample.labels, "replica": replica_id}))
        yield from families.values()


def _ours_excluded(families: Iterable[Metric]) -> Iterator[Metric]:
    """Process and interpreter families say nothing of an engine and would clash with a scraper's own."""
    return (family for family in families if not family.name.startswith(("process_", "python_")))
