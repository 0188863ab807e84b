"""Ray Serve: `up`, rollouts, a weight update, a killed replica that comes back, `down`. Engines are simulated."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from engines.process.port import free_port
from gateway.ledger.ledger import default_folder
from gateway.weights.snapshots import in_memory
from tests.rigs.ray_app import RESTART_S, App
from tests.rigs.shell import NAME, SCRIPT, Shell, clusterless
from tests.rigs.waiting import wait_until

pytest.importorskip("ray")

pytestmark = [pytest.mark.story, pytest.mark.ray]


def test_an_application_goes_up_replaces_a_killed_replica_and_goes_down_without_a_trace(tmp_path: Path) -> None:
    before = kept()
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as temporary, clusterless(Shell(tmp_path)) as shell:
        shell.environ["TMPDIR"] = temporary
        app = up(shell)
        assert versions(app) == {0}
        app.update()
        assert versions(app) == {1}
        refuses_what_cannot_run(shell, app)
        replace_one(app)
        assert sorted(replica["restarts"] for replica in app.replicas().values()) == [0, 1]
        assert versions(app) == {1}
        assert shell.run("down").stdout == f"{NAME} is down\n"
        assert shell.run("status").returncode == 1
        assert not (shell.folder / f".local/state/rollout-gateway/{NAME}.json").exists()
        assert list(Path(temporary).glob("rollout-gateway-*")) == []
        wait_until(lambda: not processes(shell), RESTART_S)
    assert kept() <= before


def kept() -> set[Path]:
    """The weight store and the ledger of the application."""
    return {path for path in (in_memory(NAME), default_folder(NAME)) if path.exists()}


def processes(shell: Shell) -> list[str]:
    """The command lines of processes that the shell's home gives away."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f"HOME={shell.folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def up(shell: Shell) -> App:
    control, rollouts = free_port(), free_port()
    done = shell.run("up", "-c", "sim.yaml", f"serve.http_port={control}", f"gateway.port={rollouts}")
    assert done.returncode == 0, done.stderr
    assert "replicas of engine:     2 RUNNING" in done.stdout
    status = json.loads(shell.run("status", "--json").stdout)
    assert (status["status"], status["rollout_url"]) == ("RUNNING", f"http://127.0.0.1:{rollouts}")
    assert [replica["state"] for replica in status["fleet"]["replicas"]] == ["SERVING", "SERVING"]
    # Ray's own command line reaches it with the token that `up` has left.
    assert (shell.folder / ".ray" / "auth_token").exists()
    environ = shell.environ | {"RAY_AUTH_MODE": "token"}
    subprocess.run([SCRIPT.with_name("serve"), "config"], env=environ, capture_output=True, check=True)
    return App(f"http://127.0.0.1:{control}")


def refuses_what_cannot_run(shell: Shell, app: App) -> None:
    """Changes that cannot run here leave the fleet as it is."""
    config = json.loads(shell.run("status", "--json").stdout)
    port, dashboard = urlsplit(config["rollout_url"]).port, urlsplit(config["dashboard"]).port
    before, control = pids(app), f"serve.http_port={urlsplit(app.control_url).port}"
    vllm = ["engine.kind=vllm", "engine.model=org/model"]
    for words, reason in (
        ([f"gateway.port={dashboard}"], "cannot be bound here"),
        (
            [f"gateway.port={port}", "engine.kind=sglang", "engine.model=org/model", "engine.tensor_parallel_size=64"],
            "a replica takes 64 GPUs",
        ),
        ([f"gateway.port={port}", *vllm, "engine.model=/nowhere/model"], "this machine has no such folder"),
    ):
        done = shell.run("up", "-c", "sim.yaml", control, *words)
        assert done.returncode == 1
        assert reason in done.stderr
        assert "nothing was started or stopped" in done.stderr
        assert pids(app) == before
    assert app.states() == ["SERVING", "SERVING"]
    assert versions(app) == {1}


def pids(app: App) -> dict[str, int]:
    return {replica_id: replica["pid"] for replica_id, replica in app.replicas().items()}


def versions(app: App) -> set[int]:
    """The weight versions of a batch that both replicas have a share of."""
    choices = app.complete()
    assert all(replica["samples_placed"] for replica in app.replicas().values())
    return {span["version"] for choice in choices for span in choice["weight_versions"]}


def replace_one(app: App) -> None:
    """kill -9 of an engine; its successor serves."""
    victim, survivor = app.replicas().values()
    os.kill(victim["pid"], signal.SIGKILL)
    wait_until(lambda: victim["pid"] not in [one["pid"] for one in app.replicas().values()], RESTART_S)
    assert app.replicas()[survivor["replica_id"]]["state"] == "SERVING"
    wait_until(lambda: app.states() == ["SERVING", "SERVING"], RESTART_S)
