"""Engines and gateways without Ray."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from engines.config import SimConfig
from engines.errors import ConfigError
from gateway.config.schema import Config
from gateway.ledger.ledger import default_folder
from gateway.weights.snapshots import in_memory
from loadtests.fleet import filled, main, replica_processes
from loadtests.own_process import Served
from loadtests.replica_process import ReplicaProcess
from tests.rigs.rig import SimReplica


def config(**engine: object) -> Config:
    return Config.model_validate({"gateway": {"port": 8100}, "engine": {"kind": "sim", "num_replicas": 2, **engine}})


def gpus_of(replicas: list[ReplicaProcess]) -> list[str | None]:
    return [replica.engine.env.get("CUDA_VISIBLE_DEVICES") for replica in replicas]


def test_each_engine_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtests.fleet.gpus_per_replica", lambda engine: engine.world_size)
    assert gpus_of(replica_processes(config(tensor_parallel_size=2), ["0", "1", "2", "3"])) == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="3 GPUs are too few for its replica 1"):
        replica_processes(config(tensor_parallel_size=2), ["0", "1", "2"])


def test_a_command_is_told_where_everything_is() -> None:
    info = SimReplica("engine-0", 0, SimConfig()).info
    infos = [replace(info, url="http://a"), replace(info, url="http://b")]
    words = filled(["run", "--host={url}", "{pid}", "{engines}"], infos, Served("http://g", 7))
    assert words == ["run", "--host=http://g", "7", "http://a", "http://b"]


def test_a_command_that_is_not_there_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fleet", "-c", "examples/sim.yaml", "--", "no-such-command", "{url}"])
    assert main() == 1
    assert "no-such-command: no such command; put .venv/bin on PATH" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = [f"gateway.port={port}", "engine.num_replicas=1", "engine.kind=sim"]
        monkeypatch.setattr("sys.argv", ["fleet", *settings, "--", "true"])
        assert main() == 1
    assert f"gateway.port = {port} on 127.0.0.1 cannot be bound" in capsys.readouterr().err


BEGIN_A_SESSION = """
import json, sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/v1/sessions", json.dumps({"id": "kept"}).encode(), timeout=60).read()
sys.exit(int(sys.argv[2]))
"""


def test_a_gateway_leaves_neither_ledger_nor_weight_store_and_the_commands_status_is_the_runs() -> None:
    name = f"left-{os.getpid()}"
    settings = [f"name={name}", "gateway.port=0", "engine.num_replicas=1", "engine.kind=sim"]
    command = [sys.executable, "-c", BEGIN_A_SESSION, "{url}", "3"]
    run = subprocess.run([sys.executable, "-m", "loadtests.fleet", *settings, "--", *command], timeout=120)
    assert run.returncode == 3
    places = [default_folder(name).parent, in_memory(name)]
    assert [left for place in places for left in place.parent.glob(f"*{name}*")] == []


def test_a_fleet_that_is_stopped_ends_without_an_abort() -> None:
    """A thread waits for the end of standard input, which a terminal keeps open."""
    settings = ["gateway.port=0", "engine.num_replicas=1", "engine.kind=sim"]
    command, pipe = [sys.executable, "-m", "loadtests.fleet", *settings], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert "gateway" in json.loads(process.stdout.readline())
        process.terminate()
        process.wait(60)
        assert process.returncode == 0
