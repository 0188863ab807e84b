"""`up` and `down` on a Ray that runs already: what they deploy and remove, what they say, and when they refuse."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from engines.engine import Json
from engines.store.weight_store import WeightStore
from gateway.agents.session import Head
from gateway.cli import down, up
from gateway.cli.cluster import progress
from gateway.cli.cluster.changes import changes
from gateway.cli.cluster.state import ApplicationBusy, State, changing, process_started_at
from gateway.config.schema import Config
from gateway.config.serve_document import serve_config
from gateway.ledger.folder import Folder
from gateway.weights.snapshots import in_memory
from tests.rigs.shell import NAME, NearShell, Shell
from tests.rigs.stories.played_serve import PlayedServe, played_serve


@pytest.fixture
def serve() -> Iterator[PlayedServe]:
    with played_serve() as serve:
        yield serve


@pytest.fixture
def shell(tmp_path: Path, serve: PlayedServe, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setattr(progress, "_POLL_S", 0.01)
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as place:
        # Without the folders of engines of others on this machine.
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield near_shell(tmp_path, serve)


def near_shell(tmp_path: Path, serve: PlayedServe) -> Shell:
    shell = NearShell(tmp_path)
    shell.environ["RAY_DASHBOARD_ADDRESS"] = serve.url
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        shell.environ.pop(name, None)
    return shell


def document(**engine: object) -> Json:
    config = Config.model_validate({"name": NAME, "engine": {"kind": "sim", "num_cpus": 0.1, **engine}})
    return dict(serve_config(config)["applications"][0])


def test_a_change_of_num_replicas_alone_restarts_nothing(shell: Shell, serve: PlayedServe) -> None:
    assert shell.run("up", "-c", "sim.yaml").returncode == 0
    args = serve.deployed[0]["applications"][0]["args"]
    done = shell.run("up", "-c", "sim.yaml", "engine.num_replicas=3")
    assert done.returncode == 0, done.stderr
    assert "engine: 2 -> 3 replicas; nothing restarts" in done.stderr
    (application,) = serve.deployed[-1]["applications"]
    assert application["args"] == args  # Serve restarts replicas for other arguments
    overrides = {one["name"]: one for one in application["deployments"]}
    assert overrides["engine"]["num_replicas"] == 3
    assert overrides["gateway"]["user_config"] == {"num_replicas": {"engine": 3}}
    again = shell.run("up", "-c", "sim.yaml")  # what its file says holds again
    assert "engine: 3 -> 2 replicas; nothing restarts" in again.stderr


def test_up_deploys_on_a_ray_where_serve_has_not_run_yet(shell: Shell, serve: PlayedServe) -> None:
    serve.has_run = False
    done = shell.run("up", "-c", "sim.yaml")
    assert done.returncode == 0, done.stderr
    assert len(serve.deployed) == 1


def test_up_says_beforehand_what_restarts_and_why(shell: Shell, serve: PlayedServe) -> None:
    shell.run("up", "-c", "sim.yaml")
    words = ("engine.max_num_seqs=7", "engine.num_replicas=3", "fleet.lost_after_s=20")
    done = shell.run("up", "-c", "sim.yaml", *words)
    assert (
        "engine.max_num_seqs, fleet.lost_after_s changed: engine replicas restart one after the other, and the gateway "
        "restarts"
    ) in done.stderr
    assert done.stderr.index("changed:") < done.stderr.index("deploying")
    assert serve.deployed[-1]["applications"][0]["args"]["engine"]["max_num_seqs"] == 7
    assert "nothing changes" in shell.run("up", "-c", "sim.yaml", *words).stderr


def test_a_key_that_is_written_out_is_refused_and_not_shown(shell: Shell, serve: PlayedServe) -> None:
    done = shell.run("up", "-c", "sim.yaml", "gateway.admin_keys=hunter2")
    assert done.returncode == 1
    assert "gateway.admin_keys has a key that is written out" in done.stderr
    assert "hunter" not in done.stderr + str(serve.deployed)


def test_another_key_of_an_external_server_is_a_change() -> None:
    theirs = {"kind": "external", "url": "http://127.0.0.1:1"}
    before, after = document(**theirs, api_key="env:OLD"), document(**theirs, api_key="env:NEW")
    assert changes(before, after).keys == ("engine.api_key",)


def test_what_a_killed_up_left_without_a_running_engine_is_removed_first(shell: Shell, serve: PlayedServe) -> None:
    wrong = document(extra={"nonsense": 1})
    serve.applications = {NAME: serve.running(wrong, engine_state="STARTING", status="DEPLOYING")}
    done = shell.run("up", "-c", "sim.yaml")
    assert done.returncode == 0, done.stderr
    assert f"{NAME} has no running engine (DEPLOYING): removing it" in done.stderr
    assert serve.deleted == [NAME]
    assert "extra" not in serve.deployed[-1]["applications"][0]["args"]["engine"]


def test_a_taken_port_is_named_before_ray_is_started(
    shell: Shell, serve: PlayedServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "start_ray", lambda *_: pytest.fail("Ray was started"))
    taken = urlsplit(serve.url).port
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    shell.environ["RAY_DASHBOARD_ADDRESS"] = f"http://127.0.0.1:{port}"
    done = shell.run("up", "-c", "sim.yaml", f"gateway.port={taken}")
    assert done.returncode == 1
    assert f"gateway.port = {taken}: cannot be bound here (Address already in use)" in done.stderr


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("gateway.port={taken}", "cannot be bound here (Address already in use)"),
        ("engine.model=/nowhere/model", "engine.model = '/nowhere/model': this machine has no such folder"),
        ("engine.gpus_per_replica=1", "This machine has no GPU"),
        ("engine.num_cpus=64", "engine: a replica takes 64 CPUs (num_cpus) and the largest node has 2"),
    ],
)
def test_what_cannot_run_leaves_the_running_fleet_alone(
    shell: Shell, serve: PlayedServe, word: str, reason: str
) -> None:
    shell.run("up", "-c", "sim.yaml")
    words = [word.format(taken=urlsplit(serve.url).port), "serve.http_port=0"]
    kind = [] if word.startswith("gateway") else ["engine.kind=vllm", "engine.model=org/model"]
    done = shell.run("up", "-c", "sim.yaml", *kind, *words)
    assert done.returncode == 1
    assert reason in done.stderr
    assert "nothing was started or stopped" in done.stderr
    assert (len(serve.deployed), serve.deleted) == (1, [])


def test_gpus_of_other_machines_count_and_their_files_are_not_looked_for(shell: Shell, serve: PlayedServe) -> None:
    serve.node = {"state": "ALIVE", "node_ip": "203.0.113.7", "resources_total": {"GPU": 1.0}}
    words = ("engine.kind=vllm", "engine.model=/elsewhere/model", "engine.gpus_per_replica=1")
    done = shell.run("up", "-c", "sim.yaml", *words)
    assert "engine: 2 x 1) and the cluster has 1 (203.0.113.7: 1)" in done.stderr
    assert "no such folder" not in done.stderr
    assert serve.deployed == []


def test_a_fleet_that_goes_on_after_a_failed_change_is_not_removed(shell: Shell, serve: PlayedServe) -> None:
    """Serve lists nothing of an application whose change it cannot build, and leaves what runs."""
    shell.run("up", "-c", "sim.yaml")
    serve.outcome, serve.builds = "DEPLOY_FAILED", False
    failed = shell.run("up", "-c", "sim.yaml", "engine.env.A=b", "gateway.max_attempts=7")
    assert "`rollout-gateway status` tells what serves now" in failed.stderr
    serve.outcome, serve.builds = "RUNNING", True
    done = shell.run(
        "up", "-c", "sim.yaml", "gateway.max_attempts=7"
    )  # of the failed change, only the engines' key goes
    assert done.returncode == 0, done.stderr
    assert serve.deleted == []


def test_a_replica_that_the_gateway_refuses_undoes_up_with_the_reason(shell: Shell, serve: PlayedServe) -> None:
    serve.refused = {"theirs-0": "engines.policy serves 'sim' and engines.theirs serves 'judge'"}
    done = shell.run("up", "-c", "sim.yaml")
    assert done.returncode == 1
    assert "replica theirs-0 does not fit in: engines.policy serves 'sim' and engines.theirs serves" in done.stderr
    assert serve.deleted == [NAME]


def test_a_second_application_on_one_ray_is_refused_and_the_first_is_left_alone(
    shell: Shell, serve: PlayedServe
) -> None:
    shell.run("up", "-c", "sim.yaml")
    done = shell.run("up", "-c", "sim.yaml", "name=other")
    assert done.returncode == 1
    assert f"serves the application {NAME!r} at /" in done.stderr
    assert f"rollout-gateway down --name {NAME}" in done.stderr
    assert list(serve.applications) == [NAME]
    assert len(serve.deployed) == 1


def test_a_second_gateway_of_one_name_is_refused_where_the_first_has_its_own_ray(
    shell: Shell, serve: PlayedServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(shell.folder))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    State(
        name=NAME,
        dashboard="http://127.0.0.1:1",
        ray_pid=os.getpid(),
        ray_started_at=process_started_at(os.getpid()),
    ).write()
    done = shell.run("up", "-c", "sim.yaml")
    assert done.returncode == 1
    assert f"{NAME} is up already, on the Ray at http://127.0.0.1:1" in done.stderr
    assert serve.deployed == []
    found = State.read(NAME)
    assert found is not None
    assert found.dashboard == "http://127.0.0.1:1"


def test_two_at_once_are_told_apart(shell: Shell, serve: PlayedServe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(shell.folder))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    with changing(NAME, "up"):
        done = shell.run("up", "-c", "sim.yaml")
        with pytest.raises(ApplicationBusy), changing(NAME, "down"):
            pass
    assert done.returncode == 1
    assert f"`rollout-gateway up` (process {os.getpid()}) changes {NAME} already: wait for it" in done.stderr
    assert serve.deployed == []
    assert shell.run("up", "-c", "sim.yaml").returncode == 0


def test_a_group_that_appears_is_a_change_and_no_number() -> None:
    one = Config.model_validate({"engine": {"kind": "sim"}, "engines": {"a": {}}})
    two = Config.model_validate({"engine": {"kind": "sim"}, "engines": {"a": {"num_replicas": 2}, "b": {}}})
    before, after = (dict(serve_config(config)["applications"][0]) for config in (one, two))
    found = changes(before, after)
    assert found.replicas == {"a": (1, 2)}
    assert "engines.b.kind" in found.keys


def test_a_number_of_a_group_that_serve_sizes_is_a_change_of_its_arguments() -> None:
    before, after = document(num_replicas=1, max_replicas=4), document(num_replicas=2, max_replicas=4)
    found = changes(before, after)
    assert (found.keys, found.replicas) == (("engine.num_replicas",), {})


def test_down_says_what_it_removed_and_what_it_kept(shell: Shell, serve: PlayedServe) -> None:
    name = f"test-{os.getpid()}"
    shell.run("up", "-c", "sim.yaml", f"name={name}", f"engine.log_dir={shell.folder}")
    store = WeightStore(in_memory(name))
    (store.folder / "v1").mkdir()
    store.close()
    done = shell.run("down", "--name", name)
    assert done.returncode == 0
    assert f"removed the application {name} with 1 Serve replicas" in done.stderr
    assert f"removed the weight store {store.folder} (0 MB)" in done.stderr
    assert f"kept: engine logs in {shell.folder}" in done.stderr
    assert not store.folder.exists()
    again = shell.run("down", "--name", name)
    assert (again.stdout, again.stderr) == (f"nothing to do: {name} does not run\n", "")


def test_an_application_of_another_release_is_told_with_the_remedy_and_taken_down(
    shell: Shell, serve: PlayedServe
) -> None:
    args = {"engine": {"kind": "sim"}, "weights": {"policy": "all"}}
    serve.applications = {NAME: serve.running({"name": NAME, "args": args})}
    for command in (["up", "-c", "sim.yaml"], ["logs"]):
        done = shell.run(*command)
        assert done.returncode == 1
        assert "(weights.policy: Extra inputs are not permitted)" in done.stderr
        assert f"first run: rollout-gateway down --name {NAME}" in done.stderr
    assert shell.run("down").stdout == f"{NAME} is down\n"
    assert serve.deleted == [NAME]


@pytest.mark.parametrize(("left", "said"), [(0, "removed the ledger"), (2, "with 2 sessions, which")])
def test_down_removes_the_ledger_unless_a_client_has_results_to_fetch(
    shell: Shell, serve: PlayedServe, left: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shell.folder / "ledgers" / "ledger"
    monkeypatch.setattr(down, "default_folder", {NAME: path}.__getitem__)
    ledger = Folder(path)
    for number in range(left):
        ledger.replace(f"session-{number}", Head("", f"{number}", 0.0, None))
    ledger.close()
    shell.run("up", "-c", "sim.yaml")
    done = shell.run("down")
    assert said in done.stderr
    assert str(path) in done.stderr
    assert path.parent.exists() == bool(left)


def test_down_leaves_the_ledger_of_another_gateway_alone(
    shell: Shell, serve: PlayedServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shell.folder / "ledgers" / "ledger"
    monkeypatch.setattr(down, "default_folder", {NAME: path}.__getitem__)
    ledger = Folder(path)
    shell.run("up", "-c", "sim.yaml")
    assert f"kept: the ledger {path}, which another process has open" in shell.run("down").stderr
    ledger.close()
    assert path.exists()


def test_logs_prints_the_ends_of_the_engines_logs_and_the_events(shell: Shell, serve: PlayedServe) -> None:
    folder = shell.folder / "logs"
    folder.mkdir()
    (folder / "engine-r1-20261122-1.log").write_text("".join(f"line {number}\n" for number in range(50)))
    (folder / "engine-lost-20261122-1.log").write_text("CUDA out of memory\n")
    (folder / "engine-older-20261121-1.log").write_text("of another run\n")
    serve.events = [{"at": 1.0, "subject": "engine-lost", "text": "SERVING -> LOST: it ended"}]
    assert "Serve knows no application" in shell.run("logs").stderr
    shell.run("up", "-c", "sim.yaml", f"engine.log_dir={folder}")
    assert f"Serve knows no application other; it has --name {NAME}" in shell.run("logs", "--name", "other").stderr
    done = shell.run("logs", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert "line 48\nline 49\n" in done.stdout
    assert "line 47" not in done.stdout
    assert "CUDA out of memory" in done.stdout
    assert "engine-lost: SERVING -> LOST: it ended" in done.stdout
    assert "of another run" not in done.stdout
    assert "of another run" in shell.run("logs", "engine-older").stdout
    serve.replicas = [{"label": "engine-0", "replica_id": "engine-older"}]
    assert "of another run" in shell.run("logs", "engine-0").stdout
    assert f"this machine has no log of engine-x in {folder}" in shell.run("logs", "engine-x").stderr
