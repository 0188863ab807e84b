"""Engines and gateways without Ray, and the Locust run that `make loadtest` makes against them."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.errors import ConfigError
from engines.server import EngineServer
from gateway.config import Config
from loadtests.fleet import engine_servers, gateway_config

ROOT = Path(__file__).parents[2]


def config(**engine: object) -> Config:
    return Config.model_validate({"gateway": {"port": 8100}, "engine": {"kind": "sim", "num_replicas": 2, **engine}})


def gpus_of(servers: list[EngineServer]) -> list[str | None]:
    return [server._config.env.get("CUDA_VISIBLE_DEVICES") for server in servers]


def test_each_engine_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtests.fleet.gpus_per_replica", lambda engine: engine.world_size)
    assert gpus_of(engine_servers(config(tensor_parallel_size=2), ["0", "1", "2", "3"])) == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="3 GPUs are too few for its replica 1"):
        engine_servers(config(tensor_parallel_size=2), ["0", "1", "2"])


def test_simulated_engines_take_no_gpu() -> None:
    assert gpus_of(engine_servers(config(), ["0", "1"])) == [None, None]


def test_a_gateway_waits_for_the_replicas_it_is_over() -> None:
    groups = Config.model_validate({"engines": {"a": {"kind": "sim"}, "b": {"kind": "sim", "num_replicas": 3}}})
    assert sum(group.num_replicas for group in gateway_config(groups, 2, own_port=True).groups.values()) == 2
    assert gateway_config(config(), 2, own_port=True).gateway.port == 8100
    assert gateway_config(config(), 1, own_port=False).gateway.port == 0


@pytest.mark.slow
def test_locust_against_a_fleet(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadtests.fleet", "engine.kind=sim", "engine.num_replicas=2", "gateway.port=0"]
    command += [f"engine.log_dir={tmp_path}", "--", sys.executable, "-m", "locust"]
    command += [
        "-f",
        "loadtests/locustfile.py",
        "--headless",
        "-u",
        "2",
        "-r",
        "2",
        "-t",
        "1s",
        "-s",
        "5",
        "--host",
        "{url}",
    ]
    command += ["--prompts", "3", "--samples", "2", "--prompt-tokens", "8", "--max-tokens", "4"]
    command += ["--csv", str(tmp_path / "load"), "--html", str(tmp_path / "load.html")]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert " 0 failed, " in ended.stdout
    with (tmp_path / "load_stats.csv").open() as stats:
        rows = {row["Name"]: row for row in csv.DictReader(stats)}
    assert int(rows["makespan"]["Request Count"]) > 0
    assert float(rows["makespan"]["Average Content Size"]) == 3 * 2 * 4
    assert (tmp_path / "load.html").stat().st_size > 0
