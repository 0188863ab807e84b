"""The verbs, as a shell sees them: what is printed where, and the exit code."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from engines.process.port import free_port
from tests.rigs.shell import NAME, NearShell, Shell, clusterless


@pytest.fixture
def script(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return NearShell(tmp_path)


def test_validate_says_what_would_run(script: Shell) -> None:
    done = script.run("config", "validate", "-c", "sim.yaml", "--engine.num_replicas", "3")
    assert (done.returncode, done.stdout) == (0, "valid: engine x 3\n")


def test_where_the_script_is_not_installed_python_runs_the_module(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gateway.cli.main", "config", "validate", "gateway.prot=1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean gateway.port?" in done.stderr


def test_a_mistake_is_the_last_line_on_stderr(script: Shell) -> None:
    done = script.run("up", "-c", "sim.yaml", "gateway.prot=1")
    assert (done.returncode, done.stdout) == (2, "")
    first, last = done.stderr.splitlines()
    assert first == "[  0.0 s] reading the configuration"
    assert last == "rollout-gateway: argument gateway.prot: unknown key; did you mean gateway.port?"


def test_what_this_machine_cannot_run_is_said_at_once(shell: Shell) -> None:
    words = ["engine.kind=sglang", "engine.model=org/model", "engine.tensor_parallel_size=64"]
    valid = shell.run("config", "validate", *words)
    assert valid.returncode == 1
    assert "cannot run on this machine: engine: a replica takes 64 GPUs" in valid.stdout
    shell.environ["RAY_DASHBOARD_ADDRESS"] = f"http://127.0.0.1:{free_port()}"
    done = shell.run("up", *words)
    assert done.returncode == 1
    assert "rollout-gateway: engine: a replica takes 64 GPUs" in done.stderr
    assert not (shell.folder / f".local/state/rollout-gateway/{NAME}.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        "sideways",
        "up -c sim.yaml --replicas 2",
        "up -c sim.yaml engine.num_replicas=abc",
        "config validate -c",
        "doctor",
        "doctor --url http://127.0.0.1:1 --watch soon",
        "doctor --url nowhere",
        "plan",
        "plan --shape hidden_size",
        "tune engine.kind=sim --lever fast",
        "down --bogus",
    ],
)
def test_wrong_words_are_exit_code_2(shell: Shell, words: str) -> None:
    assert shell.run(*words.split()).returncode == 2


@pytest.mark.parametrize(
    "words", ["up", "up -c none.yaml", "up -c wrong.yaml", "doctor -c none.yaml", "plan --model org/none --gpus 8"]
)
def test_what_cannot_be_done_is_exit_code_1(shell: Shell, words: str) -> None:
    (shell.folder / "wrong.yaml").write_text("gateway: {prot: 1}\n")
    done = shell.run(*words.split())
    assert done.returncode == 1, done.stderr
    assert "Errno" not in done.stderr


def test_up_with_nothing_names_the_option_for_a_file(shell: Shell) -> None:
    assert "-c FILE" in shell.run("up").stderr.splitlines()[1]


def test_show_tells_origins_and_hides_keys(shell: Shell) -> None:
    shell.environ["ROLLOUT_GATEWAY_GATEWAY__ADMIN_KEYS"] = "hunter2"
    done = shell.run("config", "show", "-c", "sim.yaml")
    assert "engine.num_replicas: 2  # sim.yaml:1" in done.stdout
    assert "ROLLOUT_GATEWAY_GATEWAY__ADMIN_KEYS" in done.stdout
    assert "hunter2" not in done.stdout


def test_it_tells_its_version(shell: Shell) -> None:
    assert shell.run("--version").stdout == f"rollout-gateway {version('rollout-gateway')}\n"


def test_schema_is_json_schema(shell: Shell) -> None:
    assert "engine" in json.loads(shell.run("config", "schema").stdout)["properties"]


def test_build_prints_a_document(shell: Shell) -> None:
    done = shell.run("build", "-c", "sim.yaml")
    assert yaml.safe_load(done.stdout)["applications"][0]["import_path"] == "gateway.app:build"


def test_status_without_a_cluster_names_the_address(shell: Shell) -> None:
    done = shell.run("status")
    assert done.returncode == 1
    assert "no Ray dashboard answers at http://127.0.0.1:1" in done.stderr
    assert "start a fleet with rollout-gateway up -c FILE" in done.stderr


def test_down_without_a_cluster_has_nothing_to_do(shell: Shell) -> None:
    done = shell.run("down")
    assert (done.returncode, done.stdout) == (0, f"nothing to do: {NAME} does not run\n")


def test_up_does_not_start_a_ray_of_its_own_beside_a_named_cluster(shell: Shell) -> None:
    shell.environ["RAY_ADDRESS"] = "10.0.0.1:6379"
    done = shell.run("up", "-c", "sim.yaml")
    assert done.returncode == 1
    assert "set RAY_DASHBOARD_ADDRESS" in done.stderr


@pytest.fixture
def cluster_shell(script: Shell) -> Iterator[Shell]:
    with clusterless(script) as shell:
        yield shell


@pytest.mark.ray
def test_up_with_an_engine_that_cannot_start_ends_with_one_line_and_leaves_nothing(
    cluster_shell: Shell,
) -> None:
    shell = cluster_shell
    ports = [f"serve.http_port={free_port()}", f"gateway.port={free_port()}"]
    wrong = ["engine.num_replicas=1", "engine.extra.nonsense=1", f"engine.log_dir={shell.folder / 'logs'}"]
    done = shell.run("up", "-c", "sim.yaml", *ports, *wrong)
    assert done.returncode == 1
    first, second, *rest = done.stderr.partition("rollout-gateway: ")[2].splitlines()
    assert re.fullmatch(
        r"replica engine-\w+: the engine has no argument --nonsense 1; the engine says: "
        r'"unrecognized arguments: --nonsense 1"; remove it from engine\.extra, or correct its name',
        first,
    )
    logs = list((shell.folder / "logs").iterdir())
    assert re.fullmatch(r"    log \S+\.log ends with:", second)
    assert all(line.startswith("    | ") for line in rest)
    assert len(logs) == 1, "Serve did not start it again"
    assert shell.run("status").returncode == 1
    assert not (shell.folder / f".local/state/rollout-gateway/{NAME}.json").exists()
