"""Probes of idle replicas, in virtual time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from engines.engine import Engine
from engines.errors import DeadlineExceeded
from engines.types import EngineKind, ReplicaInfo, ReplicaState
from engines.weight_label import WeightLabel
from gateway.config.load import load
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica
from tests.rigs.virtual_time import run

SETTLED_S = 10.0


class ProbedEngine:
    """Answers probes at once, or never once it `hangs`; notes when it was probed."""

    is_connected = True
    hangs = False

    def __init__(self) -> None:
        self.probed_at: list[float] = []

    async def close(self) -> None:
        """Nothing is open."""

    async def weight_label(self, timeout_s: float) -> WeightLabel:
        return WeightLabel()

    async def health(self, timeout_s: float) -> None:
        self.probed_at.append(time.monotonic())
        if self.hangs:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.Event().wait()
            except TimeoutError:
                raise DeadlineExceeded(f"no answer within {timeout_s:g} s") from None

    async def probes_in(self, seconds: float) -> int:
        before = len(self.probed_at)
        await asyncio.sleep(seconds)
        return len(self.probed_at) - before


def watched(story: Callable[[ProbedEngine, Replica], Awaitable[None]], kind: EngineKind = EngineKind.SIM) -> None:
    """Tell a story of the first of two replicas under the fleet's default watch."""
    engines = {"engine-0": ProbedEngine(), "engine-1": ProbedEngine()}
    infos = [
        ReplicaInfo(
            replica_id=replica_id, incarnation="a", group="engine", kind=kind, url="", model="sim", world_size=0,
            max_model_len=None, max_num_seqs=8, engine_version="",
        )
        for replica_id in engines
    ]  # fmt: skip

    async def discover() -> list[ReplicaInfo]:
        return infos

    async def main() -> None:
        settings = ["engine.kind=sim", "engine.num_replicas=2", "weights.store=null"]
        connect = {replica_id: cast(Engine, engine) for replica_id, engine in engines.items()}
        fleet = Fleet(load(None, settings), discover=discover, connect=lambda info: connect[info.replica_id])
        watch = asyncio.create_task(fleet.run(), name="fleet")
        await asyncio.sleep(SETTLED_S)
        try:
            await story(engines["engine-0"], fleet.replicas[0])
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    run(main)


@pytest.mark.parametrize(
    ("kind", "is_connected", "seconds", "probes"),
    [(EngineKind.SIM, True, 30.0, 10), (EngineKind.SIM, False, 1.0, 1), (EngineKind.EXTERNAL, True, 5.0, 5)],
)
def test_an_idle_replica_of_ours_with_an_open_connection_alone_is_probed_less_often(
    kind: EngineKind, is_connected: bool, seconds: float, probes: int
) -> None:
    async def story(engine: ProbedEngine, replica: Replica) -> None:
        engine.is_connected = is_connected
        assert await engine.probes_in(seconds) == probes

    watched(story, kind)


def test_a_replica_with_rollouts_is_probed_at_every_interval() -> None:
    async def story(engine: ProbedEngine, replica: Replica) -> None:
        replica.reserve(working := Rollout(request_id="a", model="sim", n=1, tokens=1))
        with replica.carrying(working):
            replica.evidence.excuse()
            assert await engine.probes_in(5.0) == 5

    watched(story)


def test_a_wedged_idle_replica_is_suspect_within_an_interval_and_the_time_of_a_probe() -> None:
    async def story(engine: ProbedEngine, replica: Replica) -> None:
        engine.hangs = True
        silent_since = replica.evidence.answered_at
        while replica.state is not ReplicaState.SUSPECT:
            await asyncio.sleep(0.01)
        assert time.monotonic() - silent_since <= 6.1

    watched(story)
