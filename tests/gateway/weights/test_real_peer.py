"""A real vLLM on another machine, as far as files go: it does not see the weight store and fetches what it loads."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from engines.config import EngineConfig
from engines.process.launch import engine_command
from engines.process.port import free_port
from engines.process.process import EngineProcess
from examples.tiny_model import task
from tests.rigs.engines.real_trainer import TIMEOUT_S, answers, checkpoint, learn, said_at
from tests.rigs.engines.real_vllm import app, engine_config, wait_for_health
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.vllm

# What is mounted over the store's folder is seen by this command and its children alone.
ELSEWHERE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"']


@contextmanager
def vllm_elsewhere(model: Path, log_dir: Path, hidden: Path) -> Iterator[tuple[str, Path]]:
    """A vLLM with our worker extension that has a file system of its own at `hidden`: its URL, and that from here."""
    config, port = engine_config(model, log_dir), free_port()
    command = engine_command(config, port=port, index=0)
    argv = [*ELSEWHERE, str(hidden), *command.argv]
    process = EngineProcess(replace(command, argv=argv), log_dir / f"vllm-{port}.log", stop_timeout_s=5.0)
    process.start()
    try:
        wait_for_health(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}", Path(f"/proc/{_child(process.pid)}/root{hidden}")
    finally:
        asyncio.run(process.stop())


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_an_external_vllm_fetches_the_versions_that_its_machine_does_not_have(tmp_path: Path) -> None:
    store, logs, port = tmp_path / "store", tmp_path / "logs", free_port()
    store.mkdir(mode=0o700)
    if subprocess.run([*ELSEWHERE, str(store), "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    model = learn(checkpoint(), seed=7)
    expected = answers(model, tmp_path / "trained")
    keys = {"inference_keys": ["reader"], "admin_keys": ["owner"], "trusted_networks": []}
    weights = {"store": str(store), "peer_url": f"http://127.0.0.1:{port}"}
    with vllm_elsewhere(task.COMMITTED, logs, store) as (url, there):
        external = EngineConfig.model_validate({"kind": "external", "url": url})
        with (
            app({"far": external}, gateway={"port": port, **keys}, weights=weights) as real,
            BlockingRolloutClient(real.url, api_key="owner") as client,
            WeightSender(client, transport="store", timeout_s=TIMEOUT_S) as sender,
        ):
            assert real.replicas[0].fetches
            client.wait_ready(TIMEOUT_S)
            assert said_at(url) != expected
            assert sender.push(model) == 1
            assert said_at(url) == expected
            for version in (2, 3):
                expected = answers(learn(model, seed=version, share=0.1), tmp_path / "trained")
                assert sender.push(model) == version
                assert said_at(url) == expected
            assert sorted(path.name for path in there.glob("v*")) == ["v2", "v3"]
        log = "".join(path.read_text() for path in logs.iterdir())
    assert os.listdir(store / "v3")
    assert "owner" not in log
