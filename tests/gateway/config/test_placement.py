"""Which engines fit which GPUs."""

from typing import Any

import pytest

from engines.config import EngineConfig
from engines.errors import ConfigError
from gateway.config.placement import check_placement, lacking, needed


def groups(**named: dict[str, Any]) -> dict[str, EngineConfig]:
    return {name: EngineConfig.model_validate({"kind": "sglang", **levers}) for name, levers in named.items()}


def test_a_replica_needs_its_gpus_on_one_node() -> None:
    nodes = [("10.0.0.1", 8.0), ("10.0.0.2", 4.0), ("10.0.0.3", 0.0)]
    check_placement(groups(engine={"tensor_parallel_size": 8}), nodes)
    with pytest.raises(ConfigError) as refused:
        check_placement(groups(policy={"tensor_parallel_size": 8, "pipeline_parallel_size": 2}), nodes)
    assert str(refused.value) == (
        "engines.policy: a replica takes 16 GPUs (tensor x pipeline x data parallel size) and the largest node has 8 "
        "(10.0.0.1: 8, 10.0.0.2: 4); a replica cannot span nodes. Lower engines.policy.tensor_parallel_size, or, where "
        "nodes still join the cluster, set serve.nodes_may_join to true and the replicas wait for them"
    )


def test_replicas_that_share_a_gpu_need_their_share() -> None:
    sharing = {"num_replicas": 6, "gpus_per_replica": 0.5, "extra": {"mem_fraction_static": 0.4}}
    assert needed(groups(engine=sharing)) == 3
    assert lacking(groups(engine=sharing), 12, 3) == ""


def test_engines_on_cpu_need_none() -> None:
    on_cpu = groups(engine={"device": "cpu", "num_replicas": 100}, simulated={"kind": "sim"})
    check_placement(on_cpu, [("10.0.0.1", 0)])
    assert needed(on_cpu) == 0


def test_replicas_that_find_no_cpus_are_refused() -> None:
    external = {"kind": "external", "url": "http://10.0.0.9:1", "num_cpus": 99}
    nodes = [("10.0.0.1", 4.0), ("10.0.0.2", 2.0)]
    check_placement(groups(policy={"num_cpus": 1, "num_replicas": 6}, judge=external), nodes, "CPU")
    with pytest.raises(
        ConfigError, match=r"^engine: a replica takes 5 CPUs \(num_cpus\) .* Lower engine\.num_cpus, or"
    ):
        check_placement(groups(engine={"num_cpus": 5}), nodes, "CPU")
    with pytest.raises(ConfigError, match=r"take 7 CPUs \(policy: 7 x 1\) and the cluster has 6 .* Lower num_replicas"):
        check_placement(groups(policy={"num_cpus": 1, "num_replicas": 7}), nodes, "CPU")
