"""The state of a running gateway and its engines, from /status, /metrics and /server_info."""

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engines.errors import ConfigError, GatewayUnreachable, UsageError
from engines.types import EngineKind
from gateway.cli.cluster.serve_api import opener
from gateway.config.load import Setting, revealed
from tuning.doctor.engine_view import EngineView

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

_TIMEOUT_S = 10.0
# The levers that vLLM's own configuration has under the same name, by section.
_VLLM_SETTINGS = {
    "parallel_config": ("tensor_parallel_size", "data_parallel_size"),
    "model_config": ("dtype", "max_model_len", "logprobs_mode", "enforce_eager"),
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "stream_interval"),
    "cache_config": ("gpu_memory_utilization", "kv_cache_memory_bytes", "enable_prefix_caching"),
    "compilation_config": ("max_cudagraph_capture_size",),
}
# Figures by our name, and their names on each engine's page.
_SAMPLES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total"),
    "finished": ("vllm:request_success_total",),
    "generated": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "prefix_queries": ("vllm:prefix_cache_queries_total",),
    "prefix_hits": ("vllm:prefix_cache_hits_total",),
}


@dataclass(frozen=True, slots=True)
class Live:
    """`server_info` is None where no engine of the policy reports it."""

    url: str
    status: dict[str, Any]
    samples: "tuple[Sample, ...]"
    server_info: dict[str, Any] | None
    watched_s: float | None = None
    """Seconds of the counters; None for all the time since the engines' start."""

    def since(self, earlier: "Live", seconds: float) -> "Live":
        """Return the same with counters since an earlier look. A restarted engine counts from its restart."""
        before = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in earlier.samples}

        def difference(sample: "Sample") -> "Sample":
            known = before.get((sample.name, frozenset(sample.labels.items())), 0.0)
            is_counter = sample.name.endswith("_total") and known <= sample.value
            return sample._replace(value=sample.value - known) if is_counter else sample

        return replace(self, samples=tuple(map(difference, self.samples)), watched_s=seconds)

    @property
    def serving(self) -> list[str]:
        """Labels, as on /metrics, of the replicas that take rollouts."""
        return [row["label"] for row in self.status["replicas"] if row["state"] == "SERVING"]

    def by_replica(self, figure: str, **labels: str) -> dict[str, float]:
        """Return a figure of each replica whose engine reports it, summed over other labels."""
        found: dict[str, float] = {}
        for sample in self.samples:
            wanted = all(sample.labels.get(name) == value for name, value in labels.items())
            if sample.name in _SAMPLES[figure] and "replica" in sample.labels and wanted:
                replica = sample.labels["replica"]
                found[replica] = found.get(replica, 0.0) + sample.value
        return found

    def total(self, figure: str, **labels: str) -> float | None:
        """Return the sum over all replicas; None where no replica reports it."""
        found = self.by_replica(figure, **labels)
        return sum(found.values()) if found else None

    def kv_tokens(self) -> dict[str, int]:
        """Return the tokens that fit each replica's KV cache, where its engine reports them."""
        found: dict[str, int] = {}
        for sample in self.samples:  # a row for each copy of the model
            size = sample.labels.get("kv_cache_size_tokens", "")
            if "replica" in sample.labels and size.isdecimal():
                found[sample.labels["replica"]] = found.get(sample.labels["replica"], 0) + int(size)
        return found

    def seconds_of_update_steps(self) -> dict[str, float]:
        """Seconds of the last update by step; empty before the first."""
        last = self.status.get("last_weight_update") or {}
        return {step: float(seconds) for step, seconds in (last.get("seconds") or {}).items()}

    def setting(self, name: str, value: Any, path: str = "/metrics") -> Setting:
        return Setting(key=name, value=value, origin="live", place=f"{self.url}{path}")

    def engine(self) -> EngineView | None:
        """Return the running configuration of the policy's engine; None for another engine than vLLM, or no report."""
        replicas = [row for row in self.status["replicas"] if row["kind"] == EngineKind.VLLM and not row["frozen"]]
        config = (self.server_info or {}).get("vllm_config")
        if not replicas or not isinstance(config, dict):
            return None
        settings = {
            lever: self.setting(lever, _plain(config[section][lever]), "/server_info")
            for section, levers in _VLLM_SETTINGS.items()
            for lever in levers
            if isinstance(config.get(section), dict) and config[section].get(lever) is not None
        }
        device = config.get("device_config")
        return EngineView(
            where="running engine",
            kind=EngineKind.VLLM,
            settings=settings,
            model=str((config.get("model_config") or {}).get("model", "")),
            replicas=len(replicas),
            on_cpu=isinstance(device, dict) and str(device.get("device_type", device.get("device"))).startswith("cpu"),
            owner="running",
        )


def look(url: str, key: str = "", environ: Mapping[str, str] = os.environ) -> Live:
    """Read the state of the gateway at `url`; `key` is env:NAME or file:PATH. Every wait is bounded.

    Raise `ConfigError` on a malformed URL or key, `GatewayUnreachable` where no gateway answers.
    """
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise UsageError(f"argument --url: {url!r}: expected http://host:port of a gateway")
    url = url.rstrip("/")
    token = _key(key, environ)
    try:
        status = json.loads(_get(f"{url}/status", token))
        page = _get(f"{url}/metrics", token)
    except ValueError as error:
        raise GatewayUnreachable(f"{url}: no gateway of ours: /status is not JSON") from error
    if not isinstance(status, dict) or "replicas" not in status:
        raise GatewayUnreachable(f"{url}: no gateway of ours: /status lists no replicas")
    return Live(url, status, tuple(_samples(page)), _server_info(url, token))


def watch(url: str, key: str, seconds: float) -> Live:
    """Look once, or twice with `seconds` between, and return the counters of that time."""
    live = look(url, key)
    if not seconds:
        return live
    time.sleep(seconds)
    return look(url, key).since(live, seconds)


def _server_info(url: str, token: str) -> dict[str, Any] | None:
    try:
        found = json.loads(_get(f"{url}/server_info?config_format=json", token))
    except (GatewayUnreachable, ValueError):
        return None  # no engine is up, or its kind has no such route; /status says which
    return found if isinstance(found, dict) else None


def _samples(page: str) -> "Iterator[Sample]":
    # From the `serve` extra, which the examination of files does not need.
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise ConfigError(
            "argument --url: prometheus-client is not installed: pip install 'rollout-gateway[serve]'"
        ) from error
    for family in text_string_to_metric_families(page):
        yield from family.samples


def _get(url: str, token: str) -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with opener().open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as error:
        remedy = "; give --key env:NAME or file:PATH" if error.code in (401, 403) else ""
        with error:
            raise GatewayUnreachable(f"{url} answered {error.code}{remedy}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise GatewayUnreachable(f"{url}: no answer within {_TIMEOUT_S:g} s: {reason}") from error
    return body.decode("utf-8", errors="replace")


def _key(key: str, environ: Mapping[str, str]) -> str:
    kind, _, reference = key.partition(":")
    if not key:
        return ""
    if kind not in ("env", "file") or not reference:
        raise UsageError("argument --key: expected env:NAME or file:PATH, since others see what is written out here")
    return revealed("argument --key", key, environ)[0]


def _plain(value: Any) -> Any:
    """torch.bfloat16 is how vLLM prints a dtype."""
    return value.removeprefix("torch.") if isinstance(value, str) else value
