"""The sentences about what a run waited for."""

import pytest

from loadtests.report.cause import causes

RUNNING = {"engine_running.mean": 12.0}


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({}, []),
        (RUNNING, ["nothing waited: 12.0 requests ran at a time"]),
        ({"lateness_s.p99": 0.4}, ["the load generator sent requests up to 0.4 s late"]),
        (RUNNING | {"gateway_queue.mean": 30.0}, ["30.0 rollouts waited in the gateway"]),
        (RUNNING | {"engine_waiting.mean": 8.0, "engine_kv.p90": 0.2}, ["20% full (p90): max_num_seqs holds them"]),
        (
            RUNNING | {"engine_waiting.mean": 8.0, "engine_kv.p90": 0.97},
            ["8.0 requests waited in engines on average for"],
        ),
        (RUNNING | {"seconds": 10.0, "completion_s.sum": 640.0}, ["52.0 of 64.0 completions in flight were between"]),
        (RUNNING | {"seconds": 10.0, "completion_s.sum": 125.0}, ["nothing waited"]),
        (RUNNING | {"machine_cpu.mean": 0.97}, ["the CPUs of this machine were 97% busy"]),
        (RUNNING | {"machine_cpu.mean": 0.5}, ["nothing waited"]),
        (RUNNING | {"engine_preempted.sum": 5.0}, ["5 sequences lost their KV cache"]),
        ({"replicas_serving.min": 1.0, "replicas_serving.max": 2.0}, ["1 to 2 replicas served"]),
    ],
)
def test_a_run_names_what_it_waited_for(figures: dict[str, float], says: list[str]) -> None:
    found = causes(figures)
    assert len(found) == len(says)
    assert all(part in line for part, line in zip(says, found, strict=True))
