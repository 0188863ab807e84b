"""A real vLLM on another machine, as far as files go: it does not see the weight store and fetches what it loads."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines.config import EngineConfig
from engines.launch import engine_command
from engines.process import EngineProcess
from engines.server import free_port
from examples.tiny_model import task
from tests.real_vllm import app, engine_config, greedy_token_ids, wait_for_health
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.vllm

TIMEOUT_S = 60.0
# What is mounted over the store's folder is seen by this command and its children alone.
ELSEWHERE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"']


@contextmanager
def vllm_elsewhere(model: Path, log_dir: Path, hidden: Path) -> Iterator[str]:
    """A vLLM with our worker extension that has a file system of its own at `hidden`; its URL."""
    config, port = engine_config(model, log_dir), free_port()
    command = engine_command(config, port=port, index=0)
    argv = [*ELSEWHERE, str(hidden), *command.argv]
    process = EngineProcess(replace(command, argv=argv), log_dir / f"vllm-{port}.log", stop_timeout_s=5.0)
    process.start()
    try:
        wait_for_health(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run(process.stop())


def test_an_external_vllm_fetches_the_versions_that_its_machine_does_not_have(tmp_path: Path) -> None:
    store, logs, port = tmp_path / "store", tmp_path / "logs", free_port()
    store.mkdir(mode=0o700)
    if subprocess.run([*ELSEWHERE, str(store), "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    model = AutoModelForCausalLM.from_pretrained(task.COMMITTED, dtype=torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    tokenizer = AutoTokenizer.from_pretrained(task.COMMITTED)
    model.save_pretrained(tmp_path / "trained")
    tokenizer.save_pretrained(tmp_path / "trained")
    asked = list(islice(task.problems(seed=9), 8))
    expected = task.greedy_token_ids(str(tmp_path / "trained"), asked)
    prompts = [task.prompt_token_ids(tokenizer, problem) for problem in asked]
    keys = {"inference_keys": ["reader"], "admin_keys": ["owner"], "trusted_networks": []}
    weights = {"store": str(store), "peer_url": f"http://127.0.0.1:{port}"}
    with vllm_elsewhere(task.COMMITTED, logs, store) as url:
        external = EngineConfig.model_validate({"kind": "external", "url": url})
        with (
            app({"far": external}, gateway={"port": port, **keys}, weights=weights) as real,
            BlockingRolloutClient(real.url, api_key="owner") as client,
            WeightSender(client, transport="store", timeout_s=TIMEOUT_S) as sender,
        ):
            assert real.replicas[0].fetches
            client.wait_ready(TIMEOUT_S)
            assert greedy_token_ids(url, prompts, task.MAX_ANSWER_TOKENS) != expected
            assert sender.push(model) == 1
            assert greedy_token_ids(url, prompts, task.MAX_ANSWER_TOKENS) == expected
        log = "".join(path.read_text() for path in logs.iterdir())
    assert os.listdir(store / "v1")
    assert "owner" not in log
