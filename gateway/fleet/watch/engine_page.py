"""The load of an engine, read from its Prometheus page. A regular expression reads the few lines that are needed."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

_LE = re.compile(r'le="([^"]+)"')
_KV = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
_LENGTHS = ("vllm:request_generation_tokens_bucket", "sglang:generation_tokens_histogram_bucket")
_OF_LOAD = (*_KV, *_RUNNING, *_WAITING, *_GENERATED, *_LENGTHS)


@dataclass(slots=True)
class EngineLoad:
    """`kv_usage` is the fullest share of any copy of the model; counts are sums over copies.

    `lengths` counts finished requests by the upper edge of their number of tokens, edge by edge and not cumulated.
    """

    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0
    generated: float = 0.0
    lengths: dict[float, float] = field(default_factory=dict)


def read_load(page: str) -> EngineLoad:
    """Read a page of vLLM, SGLang or the simulated engine; what a page lacks is 0."""
    load, cumulated = EngineLoad(), defaultdict[float, float](float)
    for name, labels, value in _samples(page, _OF_LOAD):
        if name in _KV:
            load.kv_usage = max(load.kv_usage, value)
        elif name in _RUNNING:
            load.running += int(value)
        elif name in _WAITING:
            load.waiting += int(value)
        elif name in _GENERATED:
            load.generated += value
        elif name in _LENGTHS and (edge := _upper_edge(labels)) is not None:
            cumulated[edge] += value
    edges = sorted(cumulated)
    for lower, upper in zip([None, *edges], edges, strict=False):
        load.lengths[upper] = cumulated[upper] - (0.0 if lower is None else cumulated[lower])
    return load


def read_total(page: str, names: tuple[str, ...]) -> float | None:
    """The sum of all samples of these names; None where the page has none."""
    found = [value for _, _, value in _samples(page, names)]
    return sum(found) if found else None


def _samples(page: str, names: tuple[str, ...]) -> Iterator[tuple[str, str, float]]:
    """Yield name, labels and value of the finite samples of these names, in the order of the page."""
    for name, labels, text in _lines_of(names).findall("\n" + page):
        value = _number(text)
        if value is not None:
            yield name, labels, value


@lru_cache
def _lines_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """The line end before a name is found far sooner than a place where a line may begin."""
    return re.compile(rf"\n({'|'.join(map(re.escape, names))})(?:\{{([^}}]*)\}})? (\S+)")


def _number(text: str) -> float | None:
    """None for text that is no finite number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _upper_edge(labels: str) -> float | None:
    """The edge of a bucket. The last has none above it, and is infinite."""
    edge = _LE.search(labels)
    if edge is None:
        return None
    return math.inf if edge[1] == "+Inf" else _number(edge[1])
