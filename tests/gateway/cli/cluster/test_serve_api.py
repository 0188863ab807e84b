"""A dashboard that is not there, one that is there and says nothing, and one that still starts."""

import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path

import pytest

from engines.process.port import free_port
from gateway.cli.cluster.progress import Report
from gateway.cli.cluster.serve_api import (
    ClusterRefused,
    ClusterTroubled,
    ClusterUnreachable,
    ServeApi,
    ask_control_plane,
)
from gateway.cli.cluster.state import State, process_started_at
from gateway.cli.down import down
from tests.rigs.greeter import greeter


@pytest.fixture
def silent() -> Iterator[ServeApi]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield ServeApi(f"http://127.0.0.1:{server.getsockname()[1]}", ask_timeout_s=0.05, recovery_s=0.0)


def test_where_nobody_listens_no_dashboard_is_up() -> None:
    api = ServeApi(f"http://127.0.0.1:{free_port()}")
    assert not api.is_up()
    with pytest.raises(ClusterUnreachable, match=f"no Ray dashboard answers at {api.address}"):
        api.details()


def test_a_silent_dashboard_is_not_taken_for_none(silent: ServeApi) -> None:
    for ask in (silent.is_up, silent.details):
        with pytest.raises(ClusterTroubled, match=f"the Ray dashboard at {silent.address} has not answered GET /api/"):
            ask()


class Dashboard(ThreadingHTTPServer):
    """It answers each of `statuses` once, the last one for ever; 0 closes the connection."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.statuses = [200]
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Dashboard

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        statuses = self.server.statuses
        self.server.asked.append(self.command)
        if status := statuses[0] if len(statuses) == 1 else statuses.pop(0):
            self.send_response(status)
            self.send_header("Content-Length", "20")
            self.end_headers()
            self.wfile.write(b'{"applications": {}}')

    def do_PUT(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    with Dashboard() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server
        server.shutdown()


def test_a_dashboard_that_still_starts_is_asked_again(dashboard: Dashboard) -> None:
    api = ServeApi(dashboard.address)
    dashboard.statuses = [500, 0, 200]
    assert api.details() == {"applications": {}}
    dashboard.statuses = [0, 200, 500, 503, 200]
    api.deploy({"name": "mine"}, {"proxy_location": "HeadOnly", "http_options": {}})
    assert dashboard.asked == ["GET"] * 3 + ["GET"] * 2 + ["PUT"] * 3


@pytest.mark.parametrize(("status", "told"), [(500, "answered 500 to GET"), (0, "closed the connection of GET")])
def test_a_dashboard_that_stays_in_trouble_is_given_up(dashboard: Dashboard, status: int, told: str) -> None:
    dashboard.statuses = [status]
    with pytest.raises(ClusterTroubled, match=told):
        ServeApi(dashboard.address, recovery_s=0.01).details()


def test_a_refusal_of_the_dashboard_is_told_at_once(dashboard: Dashboard) -> None:
    dashboard.statuses = [401]
    with pytest.raises(ClusterRefused, match="set RAY_AUTH_TOKEN"):
        ServeApi(dashboard.address).details()
    assert len(dashboard.asked) == 1


def test_a_control_plane_that_speaks_no_http_does_not_answer() -> None:
    with greeter() as url:
        assert ask_control_plane(url, "/status") == {}


@pytest.fixture
def report() -> Report:
    return Report(StringIO())


@pytest.fixture
def silent_dashboard(silent: ServeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServeApi:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(ServeApi, "from_environment", lambda: silent)
    return silent


def test_down_of_a_silent_cluster_of_others_says_so_and_forgets_nothing(
    silent_dashboard: ServeApi, report: Report
) -> None:
    State(name="mine", dashboard=silent_dashboard.address).write()
    with pytest.raises(ClusterTroubled):
        down("mine", report)
    assert State.read("mine") is not None


@pytest.mark.parametrize("is_silent", [True, False])
def test_down_ends_its_own_ray_though_the_dashboard_is_silent_or_in_trouble(
    silent_dashboard: ServeApi, dashboard: Dashboard, report: Report, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    dashboard.statuses = [500]
    api = silent_dashboard if is_silent else ServeApi(dashboard.address, recovery_s=0.01)
    monkeypatch.setattr(ServeApi, "from_environment", lambda: api)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as ray:
        started_at = process_started_at(ray.pid)
        State(name="mine", dashboard=api.address, ray_pid=ray.pid, ray_started_at=started_at).write()
        assert down("mine", report)
        assert ray.wait(0) < 0
    assert State.read("mine") is None
