"""The load of an engine, read from its Prometheus page. A regular expression reads the few lines that are needed."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

_LE = re.compile(r'le="([^"]+)"')
_KV = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
# Texts of settings, which may hold a brace, are among the labels.
_CACHE = re.compile(r'^vllm:cache_config_info\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}', re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MOST_TOKENS = "sglang:max_total_num_tokens"
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
_READ = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "prefill_compute")
_STEPS = ("vllm:iteration_tokens_total_count", "sglang:cuda_graph_passes_total")
_OF_WORK = (*_RUNNING, *_READ[:2], "sglang:realtime_tokens_total", *_STEPS)
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


@dataclass(frozen=True, slots=True)
class EngineWork:
    """The counters of an engine: prompt tokens that it has read, those of its cache apart, the steps of a copy of the
    model, and samples that run now."""

    read: float
    steps: float
    running: float


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


def read_work(page: str) -> EngineWork | None:
    """The work of an engine so far; None where the page lacks a part of it."""
    found, steps = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, labels, value in _samples(page, _OF_WORK):
        of: dict[str, str] = dict(_LABEL.findall(labels))
        if name in _STEPS:
            if name != "sglang:cuda_graph_passes_total" or of.get("mode", "").startswith("decode"):
                steps[of.get("engine", of.get("dp_rank", ""))] += value
        else:
            found[of.get("mode", name)] += value
    if not steps or found.keys().isdisjoint(_READ):
        return None
    queried, cached, read = (found[name] for name in _READ)
    return EngineWork(read + queried - cached, max(steps.values()), sum(found[name] for name in _RUNNING))


def read_kv_tokens(page: str) -> int | None:
    """The tokens that the engine's KV cache holds, summed over copies of the model; None where the page lacks them."""
    rows = [dict(_LABEL.findall(labels)) for labels in _CACHE.findall(page)]
    return kv_tokens_of(rows) if rows else _most_tokens(page)


def _most_tokens(page: str) -> int | None:
    """SGLang's figure, of which each tensor and pipeline rank of a copy has a row."""
    copies = defaultdict[str, int](int)
    for _, labels, value in _samples(page, (_MOST_TOKENS,)):
        copy = dict(_LABEL.findall(labels)).get("dp_rank", "")
        copies[copy] = max(copies[copy], int(value))
    return sum(copies.values()) or None


def kv_tokens_of(rows: Iterable[Mapping[str, str]]) -> int | None:
    """The tokens by the labels of `vllm:cache_config_info`, which has a row for each copy of the model.

    Newer vLLM names the tokens of the row's own copy. Blocks are those of all copies together, in each row, and in a
    model with other layers than full attention a block holds other tokens than `block_size` says.
    """
    rows = list(rows)
    if own := sum(_whole(row, "kv_cache_size_tokens") for row in rows):
        return own
    return max((_whole(row, "num_gpu_blocks") * _whole(row, "block_size") for row in rows), default=0) or None


def _whole(row: Mapping[str, str], label: str) -> int:
    """A count; 0 where a row lacks it."""
    text = row.get(label, "")
    return int(text) if text.isdecimal() else 0


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
