"""The Serve application on a real Ray cluster, with simulated engines."""

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.ray_app import RESTART_S, App, deployed_alone
from tests.rigs.waiting import wait_until

pytest.importorskip("ray")

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    engine = {"kind": "sim", "model": "sim", "num_replicas": 2, "num_cpus": 0.1, "stop_timeout_s": 1}
    with deployed_alone(engine) as running:
        yield running


def test_the_control_plane_tells_the_status_and_documents_itself(app: App) -> None:
    report = app.ask(app.control_url + "/status")
    assert (report["ready"], report["replicas_expected"], len(report["replicas"])) == (True, 2, 2)
    assert app.ask(app.control_url + "/health") == {"ready": True}
    assert "/status" in app.ask(app.control_url + "/openapi.json")["paths"]
    (found,) = app.ask(app.control_url + "/prometheus/targets")
    assert (f"http://{found['targets'][0]}", found["labels"]) == (app.url, {"application": "test"})


def test_rollouts_go_to_every_replica_on_the_gateways_own_port(app: App) -> None:
    assert len(app.complete()) == 8
    assert all(replica["samples_placed"] for replica in app.replicas().values())
    assert app.url.rpartition(":")[2] != app.control_url.rpartition(":")[2]


def test_serve_reports_why_an_engine_did_not_start_and_does_not_restart_it(app: App, tmp_path: Path) -> None:
    from ray import serve

    from gateway.app import build
    from gateway.config.schema import Config

    engine = {"kind": "sim", "model": "sim", "num_cpus": 0.1, "log_dir": str(tmp_path), "extra": {"nonsense": 1}}
    tree = {"engine": engine, "gateway": {"port": 0, "ledger": None}, "weights": {"store": None}}
    hopeless = Config.model_validate({"name": "hopeless", **tree})
    with pytest.raises(RuntimeError):
        serve.run(build(hopeless), name="hopeless", route_prefix="/hopeless")
    found = serve.status().applications["hopeless"]  # what `serve status` prints
    lines = found.deployments["engine"].message.splitlines()
    assert found.status == "DEPLOY_FAILED"
    assert any(
        line.startswith("engines.errors.EngineStartFailed: replica engine-")
        and line.endswith("remove it from engine.extra, or correct its name")
        for line in lines
    )
    assert len(list(tmp_path.iterdir())) == 1
    serve.delete("hopeless")


def test_a_killed_engine_is_restarted_and_loads_the_current_version_before_it_serves(app: App) -> None:
    app.update()
    victim, survivor = app.replicas().values()
    os.kill(victim["pid"], signal.SIGKILL)
    wait_until(lambda: is_gone(app, victim["pid"]), RESTART_S)
    assert app.replicas()[survivor["replica_id"]]["state"] == "SERVING"
    wait_until(lambda: app.states() == ["SERVING", "SERVING"], RESTART_S)
    assert app.replicas().keys() == {victim["replica_id"], survivor["replica_id"]}, "the replica itself started it"
    assert {choice["weight_versions"][0]["version"] for choice in app.complete()} == {1}
    app.update()
    assert app.states() == ["SERVING", "SERVING"]
    assert {choice["weight_versions"][0]["version"] for choice in app.complete()} == {2}


def test_an_engine_that_soon_ends_again_is_left_to_serve(app: App) -> None:
    victims = []
    for _ in range(3):
        victim = min(app.replicas().values(), key=lambda replica: replica["label"])
        victims.append(victim["replica_id"])
        os.kill(victim["pid"], signal.SIGKILL)
        wait_until(functools.partial(is_gone, app, victim["pid"]), RESTART_S)
        wait_until(lambda: app.states() == ["SERVING", "SERVING"], RESTART_S)
    assert len(set(victims)) == 2, "the replica that was restarted in place is replaced at the next end"


def test_an_engine_that_stays_stopped_is_replaced_where_it_stands(app: App) -> None:
    victim = next(iter(app.replicas().values()))
    os.kill(victim["pid"], signal.SIGSTOP)
    wait_until(lambda: is_gone(app, victim["pid"]), RESTART_S)
    wait_until(lambda: app.states() == ["SERVING", "SERVING"], RESTART_S)


def test_an_engine_dies_with_its_serve_replica_on_sigkill(app: App) -> None:
    victim = next(iter(app.replicas().values()))
    tree = [victim["pid"], guard := parent(victim["pid"])]
    os.kill(parent(guard), signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in tree), RESTART_S)
    wait_until(lambda: len(app.replicas()) == 2 and victim["replica_id"] not in app.replicas(), RESTART_S)


def is_gone(app: App, pid: int) -> bool:
    return pid not in [replica["pid"] for replica in app.replicas().values()]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
