"""Updates from the store: a refused version is taken back from the memory of the tensors that were read ahead."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engines.clients.vllm_engine import VllmEngine
from engines.errors import EngineFailed
from tests.rigs.calls import note_calls, until
from tests.rigs.rig import Json, Rig, StartRig

ROOM = {"stage_bytes": 64}
"""As much as the simulated checkpoint has."""
BOTH_SERVE = {"engine-0": "SERVING", "engine-1": "SERVING"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that overwrite or restore engines, or free what they have kept, as they are made."""
    return note_calls(monkeypatch, "load_snapshot", "undo_load", "drop_receipt")


def sources(record: Json) -> set[str]:
    return {found["taken_back"]["source"] for found in record["replicas"].values()}


async def until_freed(rig: Rig) -> None:
    """Return when no engine keeps the weights before."""
    await until(lambda: all(replica._server._replaced is None for replica in rig.replicas))


@pytest.mark.parametrize("rolling", [False, True])
async def test_the_weights_before_are_freed_at_the_commit(start_rig: StartRig, folder: Path, rolling: bool) -> None:
    rig = await start_rig(2, sim=ROOM, weights={"store": str(folder)})
    assert (await rig.push(folder, value=1, rolling=rolling))[0] == 200
    await until_freed(rig)


async def test_a_trainer_that_leaves_after_the_commit_leaves_the_served_version_in_the_store(
    start_rig: StartRig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frees = asyncio.Event()

    async def stay(self: VllmEngine, timeout_s: float) -> None:
        frees.set()
        await asyncio.Event().wait()

    rig = await start_rig(2, sim=ROOM, weights={"store": str(folder)})
    monkeypatch.setattr(VllmEngine, "drop_receipt", stay)
    pushing = asyncio.create_task(rig.push(folder, value=1))
    await asyncio.wait_for(frees.wait(), 20)
    pushing.cancel()
    monkeypatch.undo()
    await rig.until(BOTH_SERVE)
    await rig.add_replica("engine-2", seed=2)
    await rig.until(BOTH_SERVE | {"engine-2": "SERVING"})
    assert {replica.weight_version for replica in rig.fleet.replicas} == {1}


async def test_an_engine_that_no_call_of_an_update_reached_is_not_asked_for_weights_of_an_older_update(
    start_rig: StartRig, folder: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still has them where the gateway died, or the engine did not answer, before they were freed."""

    async def fail(self: VllmEngine, *_: Any) -> None:
        raise EngineFailed("it is busy", replica_id=self.replica_id)

    rig = await start_rig(2, sim=ROOM, weights={"store": str(folder)})
    assert (await rig.push(folder, value=1))[0] == 200
    with monkeypatch.context() as patch:
        for name in ("prepare_snapshot", "load_snapshot"):
            patch.setattr(VllmEngine, name, fail)
        assert (await rig.push(folder, value=2))[0] == 424
    await rig.until(BOTH_SERVE)
    assert calls.count("undo_load") == 0
    assert sources((await rig.get("/v1/weight_updates"))[1]["weight_updates"][0]) == {"store"}
