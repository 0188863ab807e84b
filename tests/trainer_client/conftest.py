"""Fixtures for what sends weights: a played gateway, and simulated replicas over a weight store."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.rigs.rig import STORED, Rig, StartRig
from trainer_client import BlockingRolloutClient

if TYPE_CHECKING:
    from tests.rigs.stories.played_gateway import Answer, PlayedGateway


@pytest.fixture
def gateway() -> "Iterator[PlayedGateway]":
    from tests.rigs.stories.played_gateway import PlayedGateway  # needs torch, as the tests that ask for it do

    played = PlayedGateway()
    yield played
    played.close()


@pytest.fixture
def late_trainer(gateway: "PlayedGateway", monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers join once engines are called to, and engines find their listener at once."""
    from engines.transfer.gloo import WeightGroup

    called, join = threading.Event(), WeightGroup.join

    def join_late(group: WeightGroup) -> None:
        assert group.rank > 0 or called.wait(30.0)
        join(group)

    def look_and_join(body: dict[str, Any]) -> "Answer":
        info = body["init_info"]
        try:
            socket.create_connection((info["master_address"], info["master_port"])).close()
        except ConnectionRefusedError as error:
            return 409, {"error": str(error)}
        finally:
            called.set()
        return gateway.join(**info)

    monkeypatch.setattr(WeightGroup, "join", join_late)
    gateway.answers["/init_weight_transfer_engine"] = look_and_join


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
