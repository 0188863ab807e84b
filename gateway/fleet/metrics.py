"""The gateway's metrics, and the engines' own pages with a `replica` label."""

import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from engines.types import ReplicaState
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.attempts import End

log = structlog.get_logger()

_NAMESPACE = "rollout_gateway"
_SECONDS = (0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """One registry per gateway; seconds, bytes and counts, no label that grows with traffic."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client has it untyped
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace=_NAMESPACE, registry=self.registry)
        gauge = partial(Gauge, namespace=_NAMESPACE, registry=self.registry)
        histogram = partial(Histogram, namespace=_NAMESPACE, registry=self.registry, buckets=_SECONDS)
        self.requests = counter("requests", "Requests by route and status.", ["route", "status"])
        self.request_seconds = histogram("request_seconds", "From the request's head to the reply's end.", ["route"])
        self.queue_seconds = histogram("queue_seconds", "A rollout's wait for a replica.", ["model"])
        self.retries = counter("retries", "Attempts that ended and were followed by another, by reason.", ["reason"])
        for end in End:
            if end is not End.REFUSED:
                self.retries.labels(end)
        self.completions = counter(
            "completions", "Delivered samples by the way they ended.", ["model", "finish_reason"]
        )
        self.delivered_tokens = counter(
            "delivered_tokens", "Delivered tokens by the versions that they are behind the target.", ["model", "behind"]
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of delivered completions.", ["model"])
        self.completion_tokens = counter("completion_tokens", "Tokens of delivered completions.", ["model"])
        self.weight_version = gauge("weight_version", "The policy's weight version.")
        self.weight_updates = counter("weight_updates", "Weight updates by end.", ["end"])
        self.weight_update_seconds = histogram("weight_update_seconds", "Steps of an update.", ["step"])
        self.weight_update_bytes = counter("weight_update_bytes", "Bytes of tensors that every replica received.")
        self.canaries = counter("canaries", "Replicas checked after an update, by result.", ["result"])
        self.replicas = gauge("replicas", "Replicas by state.", ["model", "state"])
        self.replicas_behind = gauge(
            "replicas_behind", "Replicas that, in a rolling update, serve other weights than all are to hold."
        )
        self.replica_weight_version = gauge(
            "replica_weight_version", "Weight version that a replica holds; -1 where it is unknown.", ["replica"]
        )
        self.weight_age_seconds = gauge("weight_age_seconds", "Time since the policy's weight version changed.")
        self.replicas_lost = gauge(
            "replicas_lost", "Replicas lost since the gateway's start, each of which is restarted by Serve.", ["group"]
        )
        self.replicas_expected = gauge("replicas_expected", "Replicas that there are to be.", ["group"])
        self.ready = gauge("ready", "1 where the fleet is complete.")
        self.build = Info("build", "The running release.", namespace=_NAMESPACE, registry=self.registry)
        self.build.info({"version": package_version()})
        self._version_at = (0, time.time())
        self.samples_in_flight = gauge("samples_in_flight", "Samples placed on a replica.", ["model", "replica"])
        self.queue_length = gauge("queue_length", "Rollouts that wait for a replica.", ["model"])

    def observe(self, fleet: Fleet, queue_lengths: Mapping[str, int]) -> None:
        """Set the gauges just before a scrape. `queue_lengths` are by model."""
        replicas = fleet.replicas
        for gauge in (self.queue_length, self.replicas, self.samples_in_flight, self.replica_weight_version):
            gauge.clear()
        for model, length in queue_lengths.items():
            self.queue_length.labels(model).set(length)
            states = [replica.state for replica in replicas if replica.info.model == model]
            for state in ReplicaState:
                self.replicas.labels(model, state).set(states.count(state))
        for replica in replicas:
            self.samples_in_flight.labels(replica.info.model, replica.label).set(replica.load_samples)
            version = replica.weight_version
            self.replica_weight_version.labels(replica.label).set(-1 if version is None else version)
        for group, number in fleet.expected_by_group.items():
            self.replicas_expected.labels(group).set(number)
            self.replicas_lost.labels(group).set(fleet.losses.get(group, 0))
        self.ready.set(fleet.is_ready)
        self.weight_age_seconds.set(time.time() - self._version_at[1])

    def observe_versions(self, version: int, behind: int) -> None:
        """Set the policy's weight version, and the number of replicas that serve another than the target."""
        if version != self._version_at[0]:
            self._version_at = (version, time.time())
        self.weight_version.set(version)
        self.replicas_behind.set(behind)

    def page(self, engine_pages: dict[str, str]) -> bytes:
        """Return our metrics, then the engines'. `engine_pages` is Prometheus text by replica label."""
        return generate_latest(self.registry) + generate_latest(_Labelled(engine_pages))


class _Labelled(Collector):
    """Several engines' pages as one: equal families joined, each sample labelled with its replica."""

    def __init__(self, pages: dict[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for label, page in self._pages.items():
            try:
                found = list(_ours_excluded(text_string_to_metric_families(page)))
            except ValueError as error:
                log.warning("the metrics page of an engine is left out", replica=label, error=str(error))
                continue
            for family in found:
                joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    joined.samples.append(sample._replace(labels={**sample.labels, "replica": label}))
        yield from families.values()


def _ours_excluded(families: Iterable[Metric]) -> Iterator[Metric]:
    """Drop process and interpreter families, which would clash with our own, and times of creation."""
    return (
        family
        for family in families
        if not family.name.startswith(("process_", "python_")) and not family.name.endswith("_created")
    )


def package_version() -> str:
    """Return the installed release; a source tree that was never installed has none."""
    try:
        return version("rollout-gateway")
    except PackageNotFoundError:
        return "unknown"
