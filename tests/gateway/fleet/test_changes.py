"""No engine is touched before all who keep copies of its replica know of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engines.clients.vllm_engine import VllmEngine
from engines.types import PauseMode
from gateway.fleet.changes import Argument
from gateway.fleet.replica import Replica
from tests.gateway.weights.updates.test_rolling import push
from tests.rigs.rig import Json, StartRig


class SlowFollower:
    """Records the changes that it hears of, and takes them when the test says so."""

    def __init__(self, change: str = "") -> None:
        self._change = change
        self.told: list[tuple[str, str]] = []
        self.asked = asyncio.Event()
        self.may_take = asyncio.Event()

    def joined(self, replica: Replica) -> None:
        self.told.append((replica.replica_id, "joined"))

    def left(self, replica: Replica) -> None:
        self.told.append((replica.replica_id, "left"))

    def changed(self, replica: Replica, change: str, arguments: tuple[Argument, ...]) -> None:
        self.told.append((replica.replica_id, change))

    def versions(self) -> None:
        self.told.append(("", "versions"))

    async def taken(self) -> None:
        if self._change not in (told for _, told in self.told):
            return
        self.asked.set()
        await self.may_take.wait()


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of engines that change weights, or end requests."""
    calls: list[str] = []

    def recorded(name: str) -> None:
        call = getattr(VllmEngine, name)

        async def made(engine: VllmEngine, *arguments: Any, **named: Any) -> Any:
            if name != "pause" or arguments[0] is PauseMode.ABORT:
                calls.append(name)
            return await call(engine, *arguments, **named)

        monkeypatch.setattr(VllmEngine, name, made)

    for name in ("start_weight_update", "update_weights", "load_staged", "load_snapshot", "pause"):
        recorded(name)
    return calls


@pytest.mark.parametrize(
    ("weights", "change"),
    [
        ({"stage": "auto"}, "overwrite"),
        ({"stage": "never"}, "overwrite"),
        ({"stage": "never", "in_flight": "abort"}, "cut_off"),
        ({"rolling": True}, "overwrite"),
    ],
    ids=["staged", "in place", "requests that it ends", "each turn of a rolling update"],
)
async def test_an_update_touches_no_engine_before_all_copies_know_of_it(
    start_rig: StartRig, tmp_path: Path, touched: list[str], weights: Json, change: str
) -> None:
    store = {"store": str(tmp_path / "store")} if weights.get("rolling") else {"relay": "never"}
    rig = await start_rig(2, weights=weights | store)
    await rig.open_group()
    follower = SlowFollower(change)
    rig.fleet.changes.follow(follower)
    updating: asyncio.Task[Any] = asyncio.create_task(
        push(rig, tmp_path / "store") if weights.get("rolling") else rig.update()
    )
    async with asyncio.timeout(20):
        await follower.asked.wait()
    assert {name for name, told in follower.told if told == change} >= {"engine-0"}
    for _ in range(100):
        await asyncio.sleep(0)
    assert touched == []
    follower.may_take.set()
    assert await updating in (None, (200, {"weight_version": 1}))
    assert touched
    assert [told for name, told in follower.told if name == "engine-0"][-2:] == ["hold", "enter"]


async def test_all_copies_know_the_next_version_before_the_trainer_hears_that_it_is_open(start_rig: StartRig) -> None:
    rig = await start_rig(2)
    await rig.open_group()
    follower = SlowFollower("versions")
    rig.fleet.changes.follow(follower)
    starting = asyncio.create_task(rig.post("/start_weight_update", {}))
    async with asyncio.timeout(20):
        await follower.asked.wait()
    assert rig.fleet.target_version == 1
    for _ in range(100):
        await asyncio.sleep(0)
    assert not starting.done()
    follower.may_take.set()
    assert (await starting)[0] == 200


async def test_a_follower_hears_of_replicas_that_come_and_go(start_rig: StartRig) -> None:
    rig = await start_rig(1)
    follower = SlowFollower()
    rig.fleet.changes.follow(follower)
    await rig.add_replica("engine-1", seed=1)
    await rig.until({"engine-0": "SERVING", "engine-1": "SERVING"})
    await rig.replicas.pop(1).kill()
    await rig.until({"engine-0": "SERVING"})
    told = [told for name, told in follower.told if name == "engine-1"]
    assert told[0] == "joined"
    assert told[-1] == "left"
    assert "enter" in told
