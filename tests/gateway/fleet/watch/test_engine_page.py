"""The load that an engine's Prometheus page tells."""

import pytest

from gateway.fleet.watch.engine_page import EngineLoad, EngineWork, read_kv_tokens, read_load, read_work

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:generation_tokens_total{engine="0",model_name="m"} 1e+06
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:request_generation_tokens_bucket{engine="0",le="1.0",model_name="m"} 2.0
vllm:request_generation_tokens_bucket{engine="0",le="10.0",model_name="m"} 7.0
vllm:request_generation_tokens_bucket{engine="0",le="+Inf",model_name="m"} 8.0
vllm:request_generation_tokens_bucket{engine="1",le="1.0",model_name="m"} 0.0
vllm:request_generation_tokens_bucket{engine="1",le="10.0",model_name="m"} 1.0
vllm:request_generation_tokens_bucket{engine="1",le="+Inf",model_name="m"} 1.0
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 1.0
sglang:token_usage{model_name="m"} 0.5
"""


def test_a_page_of_vllm_with_two_copies_is_summed_and_its_fullest_cache_counts() -> None:
    load = read_load(VLLM)
    assert (load.running, load.waiting, load.kv_usage, load.generated) == (7, 2, 0.75, 1e6)
    assert load.lengths == {1.0: 2.0, 10.0: 6.0, float("inf"): 1.0}


def test_a_page_of_sglang() -> None:
    load = read_load(SGLANG)
    assert (load.running, load.waiting, load.kv_usage) == (5, 1, 0.5)


def test_a_page_without_a_word_of_it() -> None:
    assert read_load("") == EngineLoad()


@pytest.mark.parametrize("value", ["abc", "NaN", "+Inf", '{le="x"} 1'])
def test_a_page_with_odd_values_is_no_error(value: str) -> None:
    names = ("vllm:num_requests_running", "vllm:generation_tokens_total", "vllm:request_generation_tokens_bucket")
    separator = "" if value.startswith("{") else " "
    page = "".join(f"{name}{separator}{value}\n" for name in names)
    assert read_load(page).lengths == {}


@pytest.mark.parametrize(
    ("page", "tokens"),
    [
        ('vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n', 1600),
        (
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="150"} 1.0\n'
            'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="150"} 1.0\n',
            2400,
        ),
        (
            'vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="1200",num_gpu_blocks="150"} 1.0\n'
            'vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="1200",num_gpu_blocks="150"} 1.0\n',
            2400,
        ),
        ('vllm:cache_config_info{block_size="8",kv_cache_size_tokens="463459",num_gpu_blocks="320"} 1.0\n', 463_459),
        ('vllm:cache_config_info{block_size="8",kv_cache_size_tokens="None",num_gpu_blocks="320"} 1.0\n', 2560),
        (
            'vllm:cache_config_info{a="{}",b="\\"}",block_size="8",num_gpu_blocks="4",num_gpu_blocks_override="9"} 1\n',
            32,
        ),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n', None),
        ('sglang:max_total_num_tokens{model_name="m"} 5000.0\n', 5000),
        (
            "".join(
                f'sglang:max_total_num_tokens{{dp_rank="{copy}",model_name="m",tp_rank="{rank}"}} 5000.0\n'
                for copy in (0, 1) for rank in (2 * copy, 2 * copy + 1)
            ),
            10_000,
        ),
        ("", None),
    ],
    ids=[
        "a copy", "the blocks of both copies in each row", "tokens of each copy", "layers of several kinds",
        "a size that is not known", "braces in texts", "neither known", "SGLang", "two copies of two ranks", "none",
    ],
)  # fmt: skip
def test_the_size_of_the_kv_cache(page: str, tokens: int | None) -> None:
    assert read_kv_tokens(page) == tokens


def test_what_an_engine_has_read_is_without_its_cache_and_steps_are_those_of_a_copy() -> None:
    vllm = (
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
        'vllm:iteration_tokens_total_count{engine="0"} 500.0\nvllm:iteration_tokens_total_count{engine="1"} 480.0\n'
        'vllm:prefix_cache_queries_total{engine="0"} 900.0\nvllm:prefix_cache_hits_total{engine="0"} 200.0\n'
    )
    sglang = (
        'sglang:num_running_reqs{dp_rank="0"} 7.0\nsglang:realtime_tokens_total{mode="prefill_compute"} 700.0\n'
        'sglang:realtime_tokens_total{mode="prefill_cache"} 200.0\nsglang:realtime_tokens_total{mode="decode"} 9.0\n'
        'sglang:cuda_graph_passes_total{dp_rank="0",mode="decode_cuda_graph"} 470.0\n'
        'sglang:cuda_graph_passes_total{dp_rank="0",mode="decode_none"} 30.0\n'
        'sglang:cuda_graph_passes_total{dp_rank="0",mode="prefill_none"} 60.0\n'
    )
    assert read_work(vllm) == read_work(sglang) == EngineWork(read=700.0, steps=500.0, running=7.0)


@pytest.mark.parametrize("page", ["", "vllm:iteration_tokens_total_count 5\n", "vllm:prefix_cache_queries_total 5\n"])
def test_a_page_that_lacks_reading_or_steps_tells_nothing_of_either(page: str) -> None:
    assert read_work(page) is None
