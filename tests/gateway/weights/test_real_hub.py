"""A model named by its id on the Hugging Face hub, on a real vLLM that finds it in the cache."""

import asyncio
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines.clients.vllm_engine import VllmEngine
from engines.errors import InvalidRequest
from engines.process.port import free_port
from engines.store.manifest import Manifest
from examples.tiny_model import task
from tests.material.hub_cache import cached
from tests.rigs.engines.real_vllm import RealFleet, app, engine_config, greedy_token_ids, until_receiving
from trainer_client import BlockingRolloutClient, WeightSender
from trainer_client import trl as gloo_trl

pytestmark = pytest.mark.vllm

ASKED = list(islice(task.problems(seed=9), 8))
MODEL = "acme/digit-sort"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    folder = tmp_path_factory.mktemp("hub")
    cached(task.COMMITTED, folder / "cache", MODEL)
    env = {"HF_HUB_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    engine = engine_config(Path(MODEL), folder).model_copy(update={"env": env})
    with app({"engine": engine}, weights={"store": str(folder / "store"), "relay": "never"}) as running:
        yield running


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(task.COMMITTED)
    return [task.prompt_token_ids(tokenizer, problem) for problem in ASKED]


@functools.cache
def expected() -> list[list[int]]:
    """The answer of the checkpoint."""
    return task.greedy_token_ids(str(task.COMMITTED), ASKED)


def said(real: RealFleet, prompts: list[list[int]]) -> list[list[int]]:
    return greedy_token_ids(real.replicas[0].url, prompts, task.MAX_ANSWER_TOKENS)


def test_a_trainer_that_dies_in_the_first_transfer_leaves_the_checkpoint_served(
    real: RealFleet, prompts: list[list[int]]
) -> None:
    tensors = real.replicas[0].tensors
    assert tensors
    announced: dict[str, Any] = {
        "names": [one.name for one in tensors],
        "dtype_names": [one.dtype for one in tensors],
        "shapes": [list(one.shape) for one in tensors],
    }
    client = gloo_trl.GlooVLLMClient(real.url, group_port=free_port(), timeout_s=TIMEOUT_S)
    client.init_communicator("cpu")
    assert real.call("/start_weight_update", {})[0] == 200
    with ThreadPoolExecutor(1) as beside:
        answer = beside.submit(real.call, "/update_weights", {"update_info": announced})
        until_receiving(real)
        client.close_communicator()
        assert answer.result(TIMEOUT_S)[0] == 424
    assert real.until_serving()["weight_version"] == 0
    assert said(real, prompts) == expected()


def test_what_is_pushed_is_checked_and_completed_from_the_cached_files(
    real: RealFleet, prompts: list[list[int]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(task.COMMITTED, dtype=torch.float32)
    norm = model.model.norm.weight
    with BlockingRolloutClient(real.url) as client, WeightSender(client, transport="store") as sender:
        with pytest.raises(InvalidRequest, match=r"model\.norm\.weight"):
            sender.push({"model.norm.weight": torch.zeros(3)})
        version = sender.push({"model.norm.weight": torch.zeros_like(norm)})
    kept = Path(real.call("/status")[1]["weight_store"]["folder"]) / f"v{version}"
    assert set(Manifest.read(kept).tensors) == {one.name for one in real.replicas[0].tensors or ()}
    assert said(real, prompts) != expected()


def test_a_worker_finds_the_checkpoint_where_its_machine_has_no_such_folder(
    real: RealFleet, prompts: list[list[int]]
) -> None:
    assert said(real, prompts) != expected()
    asyncio.run(reload(real.replicas[0].url))
    assert said(real, prompts) == expected()


async def reload(url: str) -> None:
    engine = VllmEngine("engine-0", url, has_tee=True)
    try:
        await engine.load_snapshot(MODEL, 0, TIMEOUT_S)
        await engine.label_weights("0", TIMEOUT_S, is_committed=True)
        assert await engine.reset_prefix_cache(TIMEOUT_S)
    finally:
        await engine.close()
