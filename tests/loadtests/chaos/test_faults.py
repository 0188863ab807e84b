"""Faults that need nobody to start an engine anew, on simulated engines as processes; `make chaos` has them all."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.config import EngineConfig
from engines.process.engine_server import EngineServer
from engines.types import ReplicaInfo
from gateway.http.listener import Listener
from loadtests.chaos.campaign import chaos_config, hurt, small_disk
from loadtests.chaos.faults import DISK_FULL
from loadtests.fleet import named_apart

REPLICAS = 3


@pytest.fixture(scope="module")
def disk() -> Iterator[Path | None]:
    with small_disk() as disk:
        yield disk


@pytest.fixture(scope="module")
def url(disk: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("chaos")
    config = chaos_config(REPLICAS, disk or folder / "store")
    servers = [server(config.engine.model_copy(update={"log_dir": str(folder)}), index) for index in range(REPLICAS)]
    with asyncio.Runner() as runner:
        try:
            infos = runner.run(start(servers))

            async def discover() -> list[ReplicaInfo]:
                return infos

            with named_apart(config) as own:
                listener = Listener(own, discover)
                try:
                    yield listener.start()
                finally:
                    listener.stop()
        finally:
            runner.run(stop(servers))


def server(config: EngineConfig, index: int) -> EngineServer:
    return EngineServer(config, replica_id=f"engine-{index}", group="engine", index=index)


async def start(servers: list[EngineServer]) -> list[ReplicaInfo]:
    return list(await asyncio.gather(*(server.start() for server in servers)))


async def stop(servers: list[EngineServer]) -> None:
    await asyncio.gather(*(server.stop() for server in servers))


@pytest.mark.parametrize(
    "fault",
    [
        "replica fails in a rolling update",
        "trainer dies in a rolling update",
        "tensor damaged on its way to one replica",
        "tensor damaged in the store",
        DISK_FULL,
        "two trainers at once",
    ],
)
def test_a_fault_costs_nothing_but_time(url: str, disk: Path | None, fault: str) -> None:
    if fault == DISK_FULL and disk is None:
        pytest.skip("this user may not mount a file system")
    (outcome,) = asyncio.run(hurt(url, REPLICAS, [fault]))
    assert outcome.problem == ""
    assert outcome.tally.is_clean, outcome.tally.reasons
    assert outcome.tally.delivered == outcome.tally.submitted > 0
