"""A model named by its id on the Hugging Face hub, on a real vLLM that finds it in the cache."""

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch

from engines.clients.vllm_engine import VllmEngine
from engines.errors import InvalidRequest
from engines.store.manifest import Manifest
from examples.tiny_model import task
from tests.material.hub_cache import cached
from tests.rigs.engines.real_trainer import PROBLEMS, TIMEOUT_S, checkpoint, said_at, trained
from tests.rigs.engines.real_vllm import RealFleet, app, engine_config
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.vllm

MODEL = "acme/digit-sort"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    folder = tmp_path_factory.mktemp("hub")
    cached(task.COMMITTED, folder / "cache", MODEL)
    env = {"HF_HUB_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    engine = engine_config(Path(MODEL), folder).model_copy(update={"env": env})
    with app({"engine": engine}, weights={"store": str(folder / "store"), "relay": "never"}) as running:
        yield running


@functools.cache
def expected() -> list[list[int]]:
    """The answer of the checkpoint."""
    return task.greedy_token_ids(str(task.COMMITTED), PROBLEMS)


def said(real: RealFleet) -> list[list[int]]:
    return said_at(real.replicas[0].url)


def test_a_trainer_that_dies_in_the_first_transfer_leaves_the_checkpoint_served(
    real: RealFleet, tmp_path: Path
) -> None:
    with trained(real, tmp_path) as trainer:
        trainer.broken_off(trainer.client.close_communicator)
    assert real.until_serving()["weight_version"] == 0
    assert said(real) == expected()


def test_what_is_pushed_is_checked_and_completed_from_the_cached_files(real: RealFleet) -> None:
    norm = checkpoint().model.norm.weight
    with BlockingRolloutClient(real.url) as client, WeightSender(client, transport="store") as sender:
        with pytest.raises(InvalidRequest, match=r"model\.norm\.weight"):
            sender.push({"model.norm.weight": torch.zeros(3)})
        version = sender.push({"model.norm.weight": torch.zeros_like(norm)})
    (kept,) = Path(real.call("/status")[1]["weight_store"]["folder"]).glob(f"v{version}-*")
    assert set(Manifest.read(kept).tensors) == {one.name for one in real.replicas[0].tensors or ()}
    assert said(real) != expected()


def test_a_worker_finds_the_checkpoint_where_its_machine_has_no_such_folder(real: RealFleet) -> None:
    assert said(real) != expected()
    asyncio.run(reload(real.replicas[0].url))
    assert said(real) == expected()


async def reload(url: str) -> None:
    engine = VllmEngine("engine-0", url, has_tee=True)
    try:
        await engine.load_snapshot(MODEL, 0, TIMEOUT_S)
        await engine.label_weights("0", TIMEOUT_S, is_committed=True)
        assert await engine.reset_prefix_cache(TIMEOUT_S)
    finally:
        await engine.close()
