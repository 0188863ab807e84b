"""A model that two trainer processes share by FSDP2, pushed to real vLLM: its tokens are transformers' own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines.errors import InvalidRequest
from examples.tiny_model import task
from tests.rigs.engines.real_vllm import RealFleet, fleet, greedy_token_ids
from tests.rigs.model_rank import WORLD_SIZE
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.vllm

TIMEOUT_S = 120.0
PROBLEMS = list(islice(task.problems(seed=9), 8))
LAYER = "model.layers.2"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with fleet(task.COMMITTED, tmp_path_factory.mktemp("engines"), num_replicas=1) as running:
        yield running


def checkpoint(folder: Path, *, seed: int, base: Path = task.COMMITTED, of: str = "") -> Path:
    """`base` with noise on the tensors whose names begin with `of`."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(of):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(task.COMMITTED).save_pretrained(folder)
    return folder


def pushed_by_two(real: RealFleet, folder: Path, transport: str, *models: Path) -> list[str]:
    """The versions of the first rank's pushes."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    words, pipe = [str(folder), real.url, transport, *map(str, models)], subprocess.PIPE
    program = [sys.executable, "-m", "tests.rigs.model_rank"]
    ranks = [
        subprocess.Popen([*program, str(rank), *words], env=env, stdout=pipe, stderr=pipe, text=True)
        for rank in range(WORLD_SIZE)
    ]
    try:
        (said, complaints), _ = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 0, complaints[-3000:]
    return said.splitlines()


def assert_engines_say_what_transformers_says(real: RealFleet, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task.COMMITTED)
    prompts = [task.prompt_token_ids(tokenizer, problem) for problem in PROBLEMS]
    expected = task.greedy_token_ids(str(model), PROBLEMS)
    assert expected != task.greedy_token_ids(str(task.COMMITTED), PROBLEMS)
    for replica in real.replicas:
        assert greedy_token_ids(replica.url, prompts, task.MAX_ANSWER_TOKENS) == expected


@pytest.mark.parametrize("transport", ["gloo", "store"])
def test_tokens_after_each_push_are_those_of_the_new_weights(real: RealFleet, tmp_path: Path, transport: str) -> None:
    first = checkpoint(tmp_path / "first", seed=1)
    second = checkpoint(tmp_path / "second", seed=2, base=first, of=f"{LAYER}.self_attn.q_proj")
    with BlockingRolloutClient(real.url) as client:
        served = client.weight_version()
    assert pushed_by_two(real, tmp_path, transport, first) == [str(served + 1)]
    assert_engines_say_what_transformers_says(real, first)
    (tmp_path / f"ranks-{transport}").unlink()
    assert pushed_by_two(real, tmp_path, transport, first, second)[1] == str(served + 3)
    assert_engines_say_what_transformers_says(real, second)


def test_part_of_what_vllm_fuses_is_refused_and_what_was_served_is_restored(real: RealFleet, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", seed=3)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    part = f"{LAYER}.self_attn.q_proj.weight"
    with BlockingRolloutClient(real.url) as client, WeightSender(client, timeout_s=TIMEOUT_S) as sender:
        version = sender.push(weights)
        with pytest.raises(InvalidRequest, match=r"q_proj\.weight' without .*k_proj\.weight', and vLLM fuses the two"):
            sender.push({part: torch.zeros_like(weights[part])})
        client.wait_ready(TIMEOUT_S)
        assert client.weight_version() == version
    assert_engines_say_what_transformers_says(real, model)
