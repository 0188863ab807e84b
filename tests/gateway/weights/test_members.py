"""Members of an update: replicas that are being brought back delay none, and follow it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.clients.vllm_engine import VllmEngine
from engines.store.draft import Draft, claim_draft, raw
from tests.rigs.rig import Rig, StartRig

Reply = tuple[int, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


async def push(rig: Rig, folder: Path, **body: Any) -> Reply:
    path, _ = claim_draft(folder)
    draft = Draft(path, "sim")
    draft.add([raw("weight", "float32", [4, 4], bytes(64))])
    draft.finish()
    return await rig.post("/v1/weight_updates", {"transport": "store", "snapshot": path.name, **body})


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.01)


async def with_a_slow_joiner(start_rig: StartRig, folder: Path) -> Rig:
    """A fleet of two at version 1, and a third replica that loads it until its fault ends."""
    rig = await start_rig(2, weights={"store": str(folder), "control_timeout_s": 1, "relay": "never"})
    assert (await push(rig, folder))[0] == 200
    await join_slowly(rig)
    return rig


async def join_slowly(rig: Rig) -> None:
    joiner = await rig.add_replica("engine-2")
    joiner.inject(held="load_snapshot")
    await until(lambda: joiner.num_held == 1)


@pytest.mark.parametrize("rolling", [False, True])
async def test_a_replica_that_is_being_brought_back_is_no_member_and_follows(
    start_rig: StartRig, folder: Path, rolling: bool
) -> None:
    rig = await with_a_slow_joiner(start_rig, folder)
    assert await push(rig, folder, rolling=rolling) == (200, {"weight_version": 2})
    assert rig.fleet.replicas[2].state == "SYNCING"
    rig.replicas[2].inject()
    await until(lambda: all(one.weight_version == 2 for one in rig.fleet.replicas))
    await until(lambda: all(replica.can_serve for replica in rig.fleet.replicas))


async def test_a_trainer_that_leaves_before_the_load_has_replicas_drop_what_they_have_read_ahead(
    start_rig: StartRig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await start_rig(2, weights={"store": str(folder)})
    dropped: list[str] = []
    drop = VllmEngine.drop_receipt

    async def noted(self: VllmEngine, timeout_s: float) -> None:
        await drop(self, timeout_s)
        dropped.append(self.replica_id)

    monkeypatch.setattr(VllmEngine, "drop_receipt", noted)
    rig.replicas[1].inject(held="prepare_snapshot")
    pushing = asyncio.create_task(push(rig, folder))
    await until(lambda: rig.replicas[1].num_held > 0)
    pushing.cancel()
    await until(lambda: len(dropped) == 2)
    assert set(dropped) == {"engine-0", "engine-1"}
    rig.replicas[1].inject()
    assert (await push(rig, folder))[0] == 200
