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
from tests.rigs.rig import Json, Rig, StartRig


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


async def check_waits(rig: Rig, updating: "asyncio.Task[None]", touched: list[str], change: str) -> None:
    """That the update waits for the follower before it touches an engine, and goes on then."""
    follower = SlowFollower(change)
    rig.fleet.changes.follow(follower)
    async with asyncio.timeout(20):
        await follower.asked.wait()
    assert {name for name, told in follower.told if told == change} >= {"engine-0"}
    for _ in range(100):
        await asyncio.sleep(0)
    assert touched == []
    follower.may_take.set()
    await updating
    assert touched
    assert [told for name, told in follower.told if name == "engine-0"][-2:] == ["hold", "enter"]


@pytest.mark.parametrize("stage", ["auto", "never"])
async def test_a_group_update_waits_until_all_copies_know_no_version(
    start_rig: StartRig, touched: list[str], stage: str
) -> None:
    rig = await start_rig(2, weights={"stage": stage, "relay": "never"})
    await rig.open_group()
    await check_waits(rig, asyncio.create_task(rig.update()), touched, "overwrite")


async def test_a_rolling_update_waits_in_each_turn(start_rig: StartRig, tmp_path: Path, touched: list[str]) -> None:
    rig = await start_rig(2, weights={"store": str(tmp_path / "store")})

    async def pushed() -> None:
        reply: tuple[int, Json] = await push(rig, tmp_path / "store")
        assert reply == (200, {"weight_version": 1})

    await check_waits(rig, asyncio.create_task(pushed()), touched, "overwrite")


async def test_an_update_ends_no_request_before_all_copies_know_that_it_does(
    start_rig: StartRig, touched: list[str]
) -> None:
    rig = await start_rig(2, weights={"in_flight": "abort", "stage": "never", "relay": "never"})
    await rig.open_group()
    await check_waits(rig, asyncio.create_task(rig.update()), touched, "cut_off")


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
