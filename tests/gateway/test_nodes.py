"""An application on two nodes of a real Ray cluster: the gateway on the head, a replica on each."""

import gc
import os
import signal
import urllib.error
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs.ray_app import RESTART_S, App, deployed
from tests.rigs.waiting import wait_until

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    from ray.cluster_utils import Cluster

    # A replica takes all that a node has, so each node gets one.
    engine = {"kind": "sim", "model": "sim", "num_replicas": 2, "num_cpus": 1, "stop_timeout_s": 1}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        with deployed(engine) as running:
            yield running
    finally:
        ray.shutdown()
        cluster.shutdown()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # a socket of Ray's
            del cluster
            gc.collect()


def on_another_node(app: App) -> dict[str, Any]:
    here = ray.get_runtime_context().get_node_id()
    (far,) = (replica for replica in app.replicas().values() if replica["node"] != here)
    return far


def test_a_replica_on_another_node_takes_rollouts_and_weights(app: App) -> None:
    assert on_another_node(app)["state"] == "SERVING"
    assert len(app.complete()) == 8
    assert all(replica["samples_placed"] for replica in app.replicas().values())
    app.update(ray.util.get_node_ip_address())
    assert {choice["weight_versions"][0]["version"] for choice in app.complete()} == {1}
    assert app.states() == ["SERVING", "SERVING"]


def test_its_engine_listens_on_loopback_alone(app: App) -> None:
    with pytest.raises(urllib.error.URLError, match="refused"):
        app.ask(on_another_node(app)["url"] + "/resume", {})


def test_a_killed_engine_there_takes_the_current_version_before_it_serves(app: App) -> None:
    app.update(ray.util.get_node_ip_address())
    victim, version = on_another_node(app), app.ask(app.url + "/status")["weight_version"]
    os.kill(victim["pid"], signal.SIGKILL)
    wait_until(lambda: victim["pid"] not in [one["pid"] for one in app.replicas().values()], RESTART_S)
    wait_until(lambda: app.states() == ["SERVING", "SERVING"], RESTART_S)
    assert {choice["weight_versions"][0]["version"] for choice in app.complete()} == {version}
