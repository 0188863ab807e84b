"""GPUs on a real Ray cluster that pretends to have four: who gets which, and who is refused."""

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ConfigError
from engines.process.port import free_port

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def control_url() -> Iterator[str]:
    import ray
    from ray import serve

    port = free_port()
    ray.init("local", num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(name: str, **engines: dict[str, Any]) -> None:
    from ray import serve

    from gateway.app import build
    from gateway.config.schema import Config

    groups = {group: {"kind": "sim", "model": "sim", "num_cpus": 0.1, **levers} for group, levers in engines.items()}
    tree = {"name": name, "engines": groups, "gateway": {"port": 0, "ledger": None}, "weights": {"store": None}}
    serve.run(build(Config.model_validate(tree)), name=name)


def met(control_url: str, count: int) -> list[dict[str, Any]]:
    """The gateway's report of its replicas, once it has met so many."""
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(control_url + "/status", timeout=30) as response:
            replicas: list[dict[str, Any]] = json.load(response)["replicas"]
        if len(replicas) == count:
            return replicas
        assert time.monotonic() < deadline, replicas
        time.sleep(0.2)


def visible(pid: int) -> str:
    """CUDA_VISIBLE_DEVICES of a process."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(
        (value for name, _, value in (v.partition("=") for v in variables) if name == "CUDA_VISIBLE_DEVICES"), ""
    )


def test_a_replica_sees_its_own_gpus_alone_and_what_does_not_fit_is_refused(control_url: str) -> None:
    deploy(
        "fleet",
        pair={"gpus_per_replica": 2, "num_replicas": 1},
        shared={"gpus_per_replica": 0.5, "num_replicas": 2},
        bare={"num_replicas": 1},
    )
    gpus: dict[str, list[set[int]]] = {}
    for replica in met(control_url, 4):
        assert visible(replica["pid"]) == ",".join(map(str, replica["gpu_ids"])), "the engine's, not only ours"
        gpus.setdefault(replica["replica_id"].partition("-")[0], []).append(set(replica["gpu_ids"]))
    assert len(gpus["pair"][0]) == 2
    assert gpus["shared"][0] == gpus["shared"][1] != set(), "half a GPU each"
    assert not gpus["pair"][0] & gpus["shared"][0]
    assert gpus["bare"] == [set()]

    with pytest.raises(ConfigError, match=r"a replica takes 5 GPUs .* largest node has 4 "):
        deploy("large", engine={"gpus_per_replica": 5})
    with pytest.raises(ConfigError, match=r"take 6 GPUs \(engine: 3 x 2\) and the cluster has 4 "):
        deploy("many", engine={"gpus_per_replica": 2, "num_replicas": 3})
    with pytest.raises(ConfigError, match=r"take 6 CPUs \(engine: 3 x 2\) and the cluster has 4"):
        deploy("busy", engine={"num_cpus": 2, "num_replicas": 3})
    with pytest.raises(ConfigError, match=r"take 2 GPUs .* cluster's 4 are 1 free and 3 taken by others"):
        deploy("late", engine={"gpus_per_replica": 2})
