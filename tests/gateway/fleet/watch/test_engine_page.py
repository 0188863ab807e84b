"""The load that an engine's Prometheus page tells."""

import pytest

from gateway.fleet.watch.engine_page import read_load

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


@pytest.mark.parametrize("value", ["abc", "NaN", "+Inf", '{le="x"} 1'])
def test_a_page_with_odd_values_is_no_error(value: str) -> None:
    names = ("vllm:num_requests_running", "vllm:generation_tokens_total", "vllm:request_generation_tokens_bucket")
    separator = "" if value.startswith("{") else " "
    page = "".join(f"{name}{separator}{value}\n" for name in names)
    assert read_load(page).lengths == {}
