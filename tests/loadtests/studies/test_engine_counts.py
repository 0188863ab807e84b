"""Counters of engines over a run."""

from loadtests.studies.engine_counts import EngineCounts

VLLM = """\
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 25.0
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
"""
SGLANG = """\
sglang:prompt_tokens_total{model_name="m"} 1000.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 300.0
sglang:num_retracted_requests_total{model_name="m"} 4.0
"""


def test_the_pages_of_engines_are_summed() -> None:
    counts = EngineCounts.of([VLLM, VLLM])
    assert counts == EngineCounts(looked_up=200, found=50, preempted=6)
    assert counts.cached == 0.25


def test_a_page_of_sglang() -> None:
    assert EngineCounts.of([SGLANG]) == EngineCounts(looked_up=1000, found=300, preempted=4)


def test_a_run_has_what_was_counted_in_it() -> None:
    assert EngineCounts.of([VLLM, VLLM]).since(EngineCounts.of([VLLM])) == EngineCounts(100, 25, 3)


def test_engines_that_count_nothing_have_no_share() -> None:
    assert EngineCounts.of([""]).cached is None
