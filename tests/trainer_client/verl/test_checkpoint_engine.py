"""Weights from verl's workers to a gateway over simulated engines."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import torch

from engines.errors import NotAllowed, WeightUpdateConflict
from engines.store.manifest import Manifest
from tests.material.drafts import kept
from tests.rigs.rig import STORED, Rig
from tests.rigs.stories.played_gateway import PlayedGateway
from trainer_client.verl.checkpoint_engine import GatewayCheckpointEngine

pytestmark = pytest.mark.verl

EngineOf = Callable[..., GatewayCheckpointEngine]


@pytest.fixture
def rig(store_rig: Rig) -> Rig:
    return store_rig


class Gathered:
    """A worker's tensors, one after the other as verl's engines gather them."""

    def __init__(self, **shapes: list[int]) -> None:
        self.left = len(shapes)
        self._shapes = shapes

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in self._shapes.items():
            self.left -= 1
            yield name, torch.ones(shape)


@pytest.fixture
def engine_of() -> Iterator[EngineOf]:
    """Makes engines of training workers: `engine_of(url, is_master=False)`."""
    engines: list[GatewayCheckpointEngine] = []

    def make(url: str, *, is_master: bool = True, **settings: Any) -> GatewayCheckpointEngine:
        engines.append(GatewayCheckpointEngine(bucket_size=1 << 20, is_master=is_master, url=url, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


async def send(engine: GatewayCheckpointEngine, global_steps: int, weights: Gathered | None = None) -> dict[str, Any]:
    """In a thread: a training worker is a process of its own."""
    gathered = iter(weights or Gathered(**STORED))
    return await asyncio.to_thread(lambda: asyncio.run(engine.send_weights(gathered, global_steps)))


async def test_versions_count_as_verls_steps_do(rig: Rig, engine_of: EngineOf) -> None:
    await rig.open_group()
    await rig.update()
    engine = engine_of(rig.url)
    told = [(await send(engine, step))["gateway/weight_version"] for step in (10, 11, 12)]
    assert told == [2, 3, 4]
    assert (await rig.get("/weight_info"))[1]["weight_version"] == "4"


async def test_an_update_of_somebody_else_is_a_conflict_and_no_wrong_step(rig: Rig, engine_of: EngineOf) -> None:
    engine = engine_of(rig.url)
    await send(engine, 0)
    await send(engine_of(rig.url), 0)
    with pytest.raises(WeightUpdateConflict, match="version = 2, but the fleet is at 2"):
        await send(engine, 1)


async def test_a_head_that_the_served_model_does_not_name_is_its_embedding_and_is_left_out(
    rig: Rig, engine_of: EngineOf, folder: Path
) -> None:
    await send(engine_of(rig.url), 0, Gathered(**STORED, **{"lm_head.weight": [4, 4]}))
    assert set(Manifest.read(kept(folder, 1)).tensors) == {"w", "b"}


async def test_the_other_workers_take_part_and_send_nothing(engine_of: EngineOf) -> None:
    weights = Gathered(**STORED)
    assert await send(engine_of("http://127.0.0.1:1", is_master=False), 0, weights) == {}
    assert weights.left == 0


async def test_a_worker_that_fails_to_send_gathers_on_for_the_others(
    gateway: PlayedGateway, engine_of: EngineOf
) -> None:
    gateway.answers["/v1/weight_store"] = lambda _: (403, {"error": {"message": "no admin key", "code": 403}})
    weights = Gathered(**STORED)
    with pytest.raises(NotAllowed, match="no admin key"):
        await send(engine_of(gateway.url), 0, weights)
    assert weights.left == 0


async def test_without_a_store_weights_go_over_what_the_engines_receive(
    gateway: PlayedGateway, engine_of: EngineOf
) -> None:
    gateway.answers["/v1/weight_store"] = lambda _: (409, {"error": {"type": "StoreFailed", "message": "none kept"}})
    told = await send(engine_of(gateway.url), 0)
    assert told["gateway/weight_version"] == 7
    assert list(gateway.received[1]) == ["w", "b"]
