"""The gateway's metrics, and the engines' own pages with a `replica` label."""

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

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

from engines.engine import Json
from engines.types import ReplicaState
from gateway.fleet.fleet import Fleet

log = structlog.get_logger()

_NAMESPACE = "rollout_gateway"
# Larger distances to the target version share a label, so that their number is bounded.
_MOST_BEHIND = 8
End = tuple[str | None, Sequence[Json] | None]
"""How a sample ended, and the spans of its tokens by weight version."""
# Families of process and interpreter are our own, and times of creation are left out.
_CLASHES = re.compile(r"(process_|python_).*|.*_created")
_TAIL_RATIOS = (1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30)
_SECONDS = (0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """One registry per gateway; seconds, bytes and counts, no label that grows with traffic."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client has it untyped
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace=_NAMESPACE, registry=self.registry)
        gauge = partial(Gauge, namespace=_NAMESPACE, registry=self.registry)
        histogram = partial(Histogram, namespace=_NAMESPACE, registry=self.registry, buckets=_SECONDS)

        def kept(name: str, text: str, *labels: str) -> Callable[..., Counter]:
            """A counter for what each request counts, called with its labels: `labels` takes 2 us to find a child."""
            return cache(counter(name, text, labels).labels)

        self.requests = kept("requests", "Requests by route and status.", "route", "status")
        self.request_seconds = cache(
            histogram("request_seconds", "From the request's head to the reply's end.", ["route"]).labels
        )
        self.queue_seconds = cache(histogram("queue_seconds", "A rollout's wait for a replica.", ["model"]).labels)
        self.retries = counter("retries", "Attempts that ended and were followed by another, by reason.", ["reason"])
        self.kept_tokens = counter(
            "kept_tokens", "Tokens that a death, a stall or an update interrupted, and that were not made twice."
        )
        self.missing_logprobs = counter(
            "missing_logprobs", "Delivered tokens for which an engine gave no finite log-prob, though asked for it."
        )
        self.orphaned_batches = counter(
            "orphaned_batches", "Batches whose client left before it had the reply, and that ran on for a replay."
        )
        self.orphaned_batch_ends = counter(
            "orphaned_batch_ends", "Batches without a client by their end; adopted ones are a replay's.", ["end"]
        )
        self.batch_seconds = histogram(
            "batch_seconds", "From a batch of prompts in one request to its last prompt's end.", ["model"]
        )
        self.batch_tail_ratio = histogram(
            "batch_tail_ratio",
            "Time of a batch's last prompt over that of its median prompt.",
            ["model"],
            buckets=_TAIL_RATIOS,
        )
        self.completions = kept("completions", "Delivered samples by the way they ended.", "model", "finish_reason")
        self.delivered_tokens = kept(
            "delivered_tokens", "Delivered tokens by versions that they are behind the target.", "model", "behind"
        )
        self.prompt_tokens = kept("prompt_tokens", "Prompt tokens of delivered completions.", "model")
        self.completion_tokens = kept("completion_tokens", "Tokens of delivered completions.", "model")
        self.session_tokens = counter(
            "session_tokens", "Tokens of agents' sessions: sampled, and captured as ids.", ["step"]
        )
        self.masked_session_tokens = counter(
            "masked_session_tokens", "Sampled tokens of sessions that do not count in training, by reason.", ["reason"]
        )
        self.weight_version = gauge("weight_version", "The policy's weight version.")
        self.weight_updates = counter("weight_updates", "Weight updates by end.", ["end"])
        self.weight_update_seconds = histogram("weight_update_seconds", "Steps of an update.", ["step"])
        self.replicas = gauge("replicas", "Replicas by state.", ["model", "state"])
        self.replica_weight_version = gauge(
            "replica_weight_version", "Weight version that a replica holds; -1 where it is unknown.", ["replica"]
        )
        self.replica_restarts = counter(
            "replica_restarts", "Times that an engine was started again in this place after a loss.", ["replica"]
        )
        self.weight_age_seconds = gauge("weight_age_seconds", "Time since the policy's weight version changed.")
        self.replicas_lost = counter("replicas_lost", "Replicas lost, each of which is restarted by Serve.", ["group"])
        self.replicas_expected = gauge("replicas_expected", "Replicas that there are to be.", ["group"])
        self.ready = gauge("ready", "1 where the fleet is complete.")
        self.build = Info("build", "The running release.", namespace=_NAMESPACE, registry=self.registry)
        self.build.info({"version": package_version()})
        self._version_at = (0, time.monotonic())
        self.tasks = gauge("tasks", "Tasks of the gateway's event loop.")
        self.samples_in_flight = gauge("samples_in_flight", "Samples placed on a replica.", ["model", "replica"])
        self.queue_length = gauge("queue_length", "Rollouts that wait for a replica.", ["model"])

    def observe(self, fleet: Fleet, queue_lengths: Mapping[str, int]) -> None:
        """Set the gauges, and the counters that the fleet has counted, just before a scrape. `queue_lengths` are by
        model."""
        replicas = fleet.replicas
        of_replicas = self.samples_in_flight, self.replica_weight_version, self.replica_restarts
        for metric in (self.queue_length, self.replicas, self.replicas_lost, *of_replicas):
            metric.clear()
        for model, length in queue_lengths.items():
            self.queue_length.labels(model).set(length)
            states = [replica.state for replica in replicas if replica.info.model == model]
            for state in ReplicaState:
                self.replicas.labels(model, state).set(states.count(state))
        for replica in replicas:
            self.samples_in_flight.labels(replica.info.model, replica.label).set(replica.load_samples)
            self.replica_restarts.labels(replica.label).inc(replica.place.restarts)
            version = replica.weight_version
            self.replica_weight_version.labels(replica.label).set(-1 if version is None else version)
        for group, number in fleet.expected_by_group.items():
            self.replicas_expected.labels(group).set(number)
            self.replicas_lost.labels(group).inc(fleet.losses.get(group, 0))
        self.ready.set(fleet.is_ready)
        self.tasks.set(len(asyncio.all_tasks()))
        self.weight_age_seconds.set(time.monotonic() - self._version_at[1])

    def observe_version(self, version: int) -> None:
        """Set the policy's weight version."""
        if version != self._version_at[0]:
            self._version_at = (version, time.monotonic())
        self.weight_version.set(version)

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
                found = [one for one in text_string_to_metric_families(page) if not _CLASHES.fullmatch(one.name)]
            except ValueError as error:
                log.warning("the metrics page of an engine is left out", replica=label, error=str(error))
                continue
            for family in found:
                joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    joined.samples.append(sample._replace(labels={**sample.labels, "replica": label}))
        yield from families.values()


def package_version() -> str:
    """Return the installed release; a source tree that was never installed has none."""
    try:
        return version("rollout-gateway")
    except PackageNotFoundError:
        return "unknown"


class Deliveries:
    """Counts delivered samples by model: how they ended, and how stale their tokens were.

    Canaries and warm-ups never pass here, so they are no deliveries.
    """

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics

    def count(self, model: str, choices: Iterable[Json]) -> None:
        """Count the choices that end."""
        if ended := [(one["finish_reason"], one.get("weight_versions")) for one in choices if one.get("finish_reason")]:
            self.count_ends(model, ended)

    def count_ends(self, model: str, ended: Iterable[End]) -> None:
        """Count samples that have ended."""
        ends: defaultdict[str | None, int] = defaultdict(int)
        tokens: defaultdict[Any, int] = defaultdict(int)
        for reason, spans in ended:
            ends[reason] += 1
            for span in spans or ():
                # Without limits it is of a request that met several, whose engine does not say which made what.
                if (end := span["end"]) is not None:
                    tokens[span.get("base_version", span["version"])] += end - span["start"]
        for reason, number in ends.items():
            self._metrics.completions(model, reason).inc(number)
        target = self._fleet.target_of(model)
        for made_by, number in tokens.items():
            self._metrics.delivered_tokens(model, max(0, min(target - int(made_by), _MOST_BEHIND))).inc(number)

    def count_tokens(self, model: str, usage: Json | None) -> None:
        """Count the tokens of a reply."""
        usage = usage or {}
        self._metrics.prompt_tokens(model).inc(usage.get("prompt_tokens") or 0)
        self._metrics.completion_tokens(model).inc(usage.get("completion_tokens") or 0)

    def count_batch(self, model: str, seconds: Sequence[float]) -> None:
        """Count a batch by the times at which its prompts ended, from its start; one prompt is no batch."""
        if len(seconds) > 1:
            self._metrics.batch_seconds.labels(model).observe(max(seconds))
            self._metrics.batch_tail_ratio.labels(model).observe(max(seconds) / median(seconds))
