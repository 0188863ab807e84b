"""Fixtures for what sends weights: a played gateway, and simulated replicas over a weight store."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.rigs.rig import STORED, Rig, StartRig
from trainer_client import BlockingRolloutClient

if TYPE_CHECKING:
    from tests.rigs.stories.played_gateway import PlayedGateway


@pytest.fixture
def gateway() -> "Iterator[PlayedGateway]":
    from tests.rigs.stories.played_gateway import PlayedGateway  # needs torch, as the tests that ask for it do

    played = PlayedGateway()
    yield played
    played.close()


@pytest.fixture
def client(gateway: "PlayedGateway") -> Iterator[BlockingRolloutClient]:
    with BlockingRolloutClient(gateway.url) as client:
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The weight store of `store_rig`."""
    return tmp_path / "store"


@pytest.fixture
async def store_rig(start_rig: StartRig, folder: Path) -> Rig:
    """Two replicas that hold the tensors `STORED` and take versions from the store."""
    return await start_rig(2, sim={"tensors": STORED}, weights={"store": str(folder)})
