"""vLLM's metrics of a simulated engine."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sim.scheduler import SimScheduler


class SchedulerMetrics(Collector):
    """Reads vLLM's metrics from the scheduler at each scrape."""

    def __init__(self, scheduler: SimScheduler, model_name: str, kv_tokens: int) -> None:
        self._scheduler = scheduler
        self._labels = {"engine": "0", "model_name": model_name}
        self._kv_tokens = kv_tokens

    def collect(self) -> Iterator[Metric]:
        scheduler = self._scheduler
        yield self._gauge("num_requests_running", "Requests in execution batches.", len(scheduler.running))
        yield self._gauge("num_requests_waiting", "Requests waiting to be run.", len(scheduler.waiting))
        yield self._gauge("kv_cache_usage_perc", "KV cache in use; 1 is all.", scheduler.kv_used / self._kv_tokens)
        yield self._counter("prompt_tokens", "Prompt tokens read.", scheduler.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", scheduler.generated_tokens)
        yield self._counter("prefix_cache_queries", "Tokens looked up.", scheduler.cache.queried_tokens)
        yield self._counter("prefix_cache_hits", "Tokens found.", scheduler.cache.hit_tokens)
        yield self._counter("num_preemptions", "Requests sent back to wait.", scheduler.preemptions)
        yield self._cache_config()
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests that ended.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in scheduler.finished.items():
            finished.add_metric([*self._labels.values(), reason], count)
        yield finished
        yield self._lengths()
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=[*self._labels])
        steps.add_metric([*self._labels.values()], [("+Inf", scheduler.steps)], scheduler.generated_tokens)
        yield steps

    def _lengths(self) -> Metric:
        """Return vLLM's histogram of completion lengths, with its edges."""
        counts = self._scheduler.finished_lengths
        edges = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
        buckets = [(str(float(edge)), sum(n for length, n in counts.items() if length <= edge)) for edge in edges]
        buckets.append(("+Inf", counts.total()))
        total = sum(length * count for length, count in counts.items())
        family = HistogramMetricFamily("vllm:request_generation_tokens", "Tokens of a request.", labels=[*self._labels])
        family.add_metric([*self._labels.values()], buckets, total)
        return family

    def _cache_config(self) -> Metric:
        """Return the size of the KV cache as labels, as vLLM does."""
        tokens = str(self._kv_tokens)
        labels = {"engine": "0", "block_size": "1", "kv_cache_size_tokens": tokens, "num_gpu_blocks": tokens}
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
