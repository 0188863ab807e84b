"""A real vLLM on another machine, as far as files go: it does not see the weight store and fetches what it loads."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines.config import EngineConfig
from engines.process.launch import engine_command
from engines.process.port import free_port
from engines.process.process import EngineProcess
from examples.tiny_model import task
from tests.rigs.engines.real_vllm import app, engine_config, greedy_token_ids, wait_for_health
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.vllm

TIMEOUT_S = 60.0
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


def moved(model: Any, folder: Path, share: float, asked: list[str]) -> list[list[int]]:
    """The answer of the model once this share of its elements, at random places, has moved; it is saved in `folder`."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (torch.rand_like(parameter) < share), alpha=0.05)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(task.COMMITTED).save_pretrained(folder)
    return task.greedy_token_ids(str(folder), asked)


def test_an_external_vllm_fetches_the_versions_that_its_machine_does_not_have(tmp_path: Path) -> None:
    store, logs, port = tmp_path / "store", tmp_path / "logs", free_port()
    store.mkdir(mode=0o700)
    if subprocess.run([*ELSEWHERE, str(store), "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    model = AutoModelForCausalLM.from_pretrained(task.COMMITTED, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task.COMMITTED)
    torch.manual_seed(7)
    asked = list(islice(task.problems(seed=9), 8))
    expected = moved(model, tmp_path / "trained", 1.0, asked)
    prompts = [task.prompt_token_ids(tokenizer, problem) for problem in asked]
    keys = {"inference_keys": ["reader"], "admin_keys": ["owner"], "trusted_networks": []}
    weights = {"store": str(store), "peer_url": f"http://127.0.0.1:{port}"}
    with vllm_elsewhere(task.COMMITTED, logs, store) as (url, there):
        external = EngineConfig.model_validate({"kind": "external", "url": url})
        with (
            app({"far": external}, gateway={"port": port, **keys}, weights=weights) as real,
            BlockingRolloutClient(real.url, api_key="owner") as client,
            WeightSender(client, transport="store", delta=True, timeout_s=TIMEOUT_S) as sender,
        ):
            assert real.replicas[0].fetches
            client.wait_ready(TIMEOUT_S)
            assert greedy_token_ids(url, prompts, task.MAX_ANSWER_TOKENS) != expected
            assert sender.push(model) == 1
            assert greedy_token_ids(url, prompts, task.MAX_ANSWER_TOKENS) == expected
            for version in (2, 3):
                expected = moved(model, tmp_path / f"trained-{version}", 0.1, asked)
                assert sender.push(model) == version
                assert greedy_token_ids(url, prompts, task.MAX_ANSWER_TOKENS) == expected
            # The machine has made what it loaded of the version before: what comes whole comes without changes.
            assert sorted(path.parent.name for path in there.glob("v*/*.delta")) == ["v2", "v3"]
        log = "".join(path.read_text() for path in logs.iterdir())
    assert os.listdir(store / "v3")
    assert "owner" not in log
