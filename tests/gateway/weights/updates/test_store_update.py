"""Updates from the store."""

import asyncio
from pathlib import Path

import pytest

from gateway.weights.snapshots import Snapshots
from tests.rigs.calls import until
from tests.rigs.rig import StartRig

BOTH_SERVE = {"engine-0": "SERVING", "engine-1": "SERVING"}


async def test_a_trainer_that_leaves_after_the_commit_leaves_the_served_version_in_the_store(
    start_rig: StartRig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_committed, may_go_on = asyncio.Event(), asyncio.Event()
    settle = Snapshots.settle

    async def stay(self: Snapshots, served: int) -> None:
        has_committed.set()
        await may_go_on.wait()
        await settle(self, served)

    rig = await start_rig(2, weights={"store": str(folder)})
    monkeypatch.setattr(Snapshots, "settle", stay)
    pushing = asyncio.create_task(rig.push(folder, value=1))
    await asyncio.wait_for(has_committed.wait(), 20)
    pushing.cancel()
    may_go_on.set()
    await rig.until(BOTH_SERVE)
    await rig.add_replica("engine-2", seed=2)
    await rig.until(BOTH_SERVE | {"engine-2": "SERVING"})
    assert {replica.weight_version for replica in rig.fleet.replicas} == {1}


async def test_an_update_without_an_engine_waits_for_the_one_that_follows(start_rig: StartRig, folder: Path) -> None:
    """A trainer that ends at an error does not start again because an engine has."""
    rig = await start_rig(1, weights={"store": str(folder)})
    await rig.replicas.pop().kill()
    await until(lambda: not rig.fleet.replicas)
    pushing = asyncio.create_task(rig.push(folder, value=1))
    await rig.add_replica("engine-0")
    assert (await pushing)[0] == 200
    await rig.until({"engine-0": "SERVING"})
