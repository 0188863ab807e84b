"""Counters on the Prometheus pages of engines, before and after a run."""

from collections.abc import Iterable
from dataclasses import dataclass

import aiohttp

from gateway.fleet.watch.engine_page import read_total

_LOOKED_UP = ("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total")
_FOUND = ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")
_PREEMPTED = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Tokens that were looked up in prefix caches and found there, and preempted samples, since the engines' start."""

    looked_up: float
    found: float
    preempted: float

    @classmethod
    def of(cls, pages: Iterable[str]) -> "EngineCounts":
        """Sum the pages. A counter that a page lacks is 0: SGLang's pages have none before its first event."""
        text = "\n".join(pages)
        return cls(*(read_total(text, names) or 0.0 for names in (_LOOKED_UP, _FOUND, _PREEMPTED)))

    def since(self, before: "EngineCounts") -> "EngineCounts":
        return EngineCounts(
            self.looked_up - before.looked_up, self.found - before.found, self.preempted - before.preempted
        )

    @property
    def cached(self) -> float | None:
        """The share of looked-up tokens that was found; None where engines do not count them."""
        return self.found / self.looked_up if self.looked_up else None


async def pages_of(http: aiohttp.ClientSession, urls: Iterable[str]) -> list[str]:
    """Return the Prometheus pages of servers. Raise `aiohttp.ClientError` where one has none."""
    pages = []
    for url in urls:
        async with http.get(f"{url}/metrics") as answer:
            answer.raise_for_status()
            pages.append(await answer.text())
    return pages
