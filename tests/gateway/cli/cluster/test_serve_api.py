"""A dashboard that is not there, and one that is there and says nothing."""

import socket
import subprocess
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from engines.process.engine_server import free_port
from gateway.cli.cluster.progress import Report, shown
from gateway.cli.cluster.serve_api import ClusterSilent, ClusterUnreachable, ServeApi
from gateway.cli.cluster.state import State, process_started_at
from gateway.cli.down import down


@pytest.fixture
def silent() -> Iterator[ServeApi]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield ServeApi(f"http://127.0.0.1:{server.getsockname()[1]}", ask_timeout_s=0.05)


def test_where_nobody_listens_no_dashboard_is_up() -> None:
    api = ServeApi(f"http://127.0.0.1:{free_port()}")
    assert not api.is_up()
    with pytest.raises(ClusterUnreachable, match=f"no Ray dashboard answers at {api.address}"):
        api.details()


def test_a_silent_dashboard_is_not_taken_for_none(silent: ServeApi) -> None:
    for ask in (silent.is_up, silent.details):
        with pytest.raises(ClusterSilent, match=f"the Ray dashboard at {silent.address} has not answered GET /api/"):
            ask()


@pytest.fixture
def report() -> Iterator[Report]:
    with shown(Console(file=StringIO())) as report:
        yield report


@pytest.fixture
def silent_dashboard(silent: ServeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServeApi:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(ServeApi, "from_environment", lambda: silent)
    return silent


def test_down_of_a_silent_cluster_of_others_says_so_and_forgets_nothing(
    silent_dashboard: ServeApi, report: Report
) -> None:
    State(name="mine", dashboard=silent_dashboard.address).write()
    with pytest.raises(ClusterSilent):
        down("mine", report)
    assert State.read("mine") is not None


def test_down_ends_its_own_ray_though_the_dashboard_is_silent(silent_dashboard: ServeApi, report: Report) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as ray:
        started_at = process_started_at(ray.pid)
        State(name="mine", dashboard=silent_dashboard.address, ray_pid=ray.pid, ray_started_at=started_at).write()
        assert down("mine", report)
        assert ray.wait(0) < 0
    assert State.read("mine") is None
