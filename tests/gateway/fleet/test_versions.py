"""The versions that engines report as they join: which of them the fleet believes."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.config import SimConfig
from engines.types import ReplicaState
from gateway.fleet.replica import Replica
from gateway.weights.canary import Canary
from gateway.weights.verdicts import Finding, Result
from tests.rigs.rig import Rig, SimReplica, StartRig

SIM = SimConfig(decode_step_s=0.0, decode_step_per_seq_s=0.0)


async def labelled(replica_id: str, version: int) -> SimReplica:
    replica = await SimReplica(replica_id, 5, SIM).start()
    if version:
        replica.label(version)
    return replica


@pytest.fixture
async def updated(rig: Rig) -> Rig:
    """Two replicas at version 1, of which the fleet is certain."""
    await rig.open_group()
    await rig.update()
    return rig


async def stray(name: str) -> SimReplica:
    """Return a replica of version 1 of another run."""
    replica = await labelled(name, 1)
    replica.label(1, weights="of another run")
    return replica


async def stray_of_another_release(name: str) -> SimReplica:
    """Return a stray that has no peer."""
    replica = await stray(name)
    replica.info = replace(replica.info, engine_version="0.33.0")
    return replica


async def test_a_label_of_another_run_does_not_take_a_fleet_over(updated: Rig) -> None:
    updated.replicas.append(await labelled("engine-2", 7))
    async with asyncio.timeout(20):
        while len(updated.fleet.replicas) < 3:
            await asyncio.sleep(0.02)
    assert updated.fleet.version == 1
    assert await updated.states() == {"engine-0": "SERVING", "engine-1": "SERVING", "engine-2": "SYNCING"}
    reply = await updated.complete([[4, 5, 6]] * 6)
    assert {span["version"] for choice in reply["choices"] for span in choice["weight_versions"]} == {1}


async def until_proven(rig: Rig) -> list[str]:
    """Return the replicas that serve, once no reported version waits for its canary."""
    async with asyncio.timeout(20):
        while any(replica.is_unproven for replica in rig.fleet.replicas):
            await asyncio.sleep(0.02)
    return [replica.replica_id for replica in rig.fleet.replicas if replica.can_serve]


async def joined(rig: Rig, replica: SimReplica) -> Replica:
    """Return the replica once the fleet has welcomed it."""
    rig.replicas.append(replica)
    async with asyncio.timeout(20):
        while not (found := [one for one in rig.fleet.replicas if one.replica_id == replica.info.replica_id]):
            await asyncio.sleep(0.02)
    return found[0]


@pytest.mark.parametrize(("labels", "version"), [([5, 5, 0], 5), ([5, 0], 5), ([7, 0, 0], 0), ([7, 3, 3], 3)], ids=str)
async def test_a_restarted_gateway_without_a_store_believes_what_most_engines_report(
    start_rig: StartRig, labels: list[int], version: int
) -> None:
    replicas = [await labelled(f"engine-{index}", label) for index, label in enumerate(labels)]
    rig = await start_rig(len(labels), replicas=replicas)
    serving = await until_proven(rig)
    assert rig.fleet.version == version
    assert serving[0] == next(f"engine-{index}" for index, label in enumerate(labels) if label == version)
    assert all(replica.weight_version in (None, 0, version) for replica in rig.fleet.replicas)


async def test_of_engines_that_report_one_version_without_a_record_those_that_compute_alike_serve(
    start_rig: StartRig,
) -> None:
    replicas = [await labelled(f"engine-{index}", 5) for index in range(3)]
    replicas[0].label(5, weights="of a refused update")
    rig = await start_rig(3, replicas=replicas)
    assert await until_proven(rig) == ["engine-1", "engine-2"]
    assert "not borne out" in rig.fleet.replicas[0].reason
    assert rig.fleet.version == 5


async def test_a_joiner_without_a_record_that_computes_otherwise_does_not_serve_the_fleets_version(
    updated: Rig,
) -> None:
    await joined(updated, await stray("engine-2"))
    assert await until_proven(updated) == ["engine-0", "engine-1"]
    assert "not borne out" in updated.fleet.replicas[2].reason
    assert await updated.states() == {"engine-0": "SERVING", "engine-1": "SERVING", "engine-2": "SYNCING"}


async def test_a_label_that_was_not_borne_out_bears_out_no_other(updated: Rig) -> None:
    for name in ("engine-2", "engine-3"):
        await joined(updated, await stray_of_another_release(name))
        assert await until_proven(updated) == ["engine-0", "engine-1"]


async def test_labels_that_come_together_beside_a_certain_version_bear_each_other_out_no_more(updated: Rig) -> None:
    strays = [await stray_of_another_release(name) for name in ("engine-2", "engine-3")]
    await asyncio.gather(*(joined(updated, stray) for stray in strays))
    assert await until_proven(updated) == ["engine-0", "engine-1"]


async def test_a_joiner_without_a_record_that_computes_as_its_peers_serves(updated: Rig) -> None:
    await joined(updated, await labelled("engine-2", 1))
    assert await until_proven(updated) == ["engine-0", "engine-1", "engine-2"]


async def test_a_joiner_without_a_record_whose_canary_ends_after_an_update_does_not_serve_as_the_new_version(
    updated: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, is_committed, admit = asyncio.Event(), asyncio.Event(), Canary.admit

    async def late(canary: Canary, *given: Any) -> dict[Replica, Finding]:
        findings = await admit(canary, *given)
        asked.set()
        await is_committed.wait()
        return findings

    monkeypatch.setattr(Canary, "admit", late)
    joiner = await joined(updated, await labelled("engine-2", 1))
    async with asyncio.timeout(20):
        await asked.wait()
        await updated.update()
        is_committed.set()
        while "waits for the next update" not in joiner.reason:
            await asyncio.sleep(0.02)
    assert "reported version 1 without a record, and the fleet is at version 2 since" in joiner.reason
    assert await updated.states() == {"engine-0": "SERVING", "engine-1": "SERVING", "engine-2": "SYNCING"}
    await updated.open_group()
    await updated.update()
    await updated.until({"engine-0": "SERVING", "engine-1": "SERVING", "engine-2": "SERVING"})


async def test_an_engine_that_comes_back_is_known_to_the_gateway_that_updated_it_without_a_store(
    start_rig: StartRig,
) -> None:
    rig = await start_rig(1)
    await rig.open_group()
    await rig.update()
    [before] = rig.fleet.replicas
    rig.fleet.set_state(before, ReplicaState.LOST, "its connections broke")
    async with asyncio.timeout(20):
        while not any(replica.can_serve for replica in rig.fleet.replicas):
            await asyncio.sleep(0.02)
    [again] = rig.fleet.replicas
    assert again is not before
    assert (again.weight_version, rig.fleet.version) == (1, 1)


async def test_verified_versions_are_not_outvoted_by_labels_that_come_later(start_rig: StartRig) -> None:
    rig = await start_rig(2, replicas=[await labelled(f"engine-{index}", 5) for index in range(2)])
    assert await until_proven(rig) == ["engine-0", "engine-1"]
    for index in (2, 3, 4):
        await joined(rig, await labelled(f"engine-{index}", 7))
    assert await until_proven(rig) == ["engine-0", "engine-1"]
    assert rig.fleet.version == 5


async def test_a_record_outweighs_the_labels_of_others(start_rig: StartRig, tmp_path: Path) -> None:
    rig = await start_rig(2, weights={"store": str(tmp_path)})
    await rig.open_group()
    await rig.update()
    await rig.stop_gateway()
    strays = [await labelled(f"engine-{index}", 7) for index in (2, 3, 4)]
    again = await start_rig(5, replicas=[*strays, *rig.replicas], weights={"store": str(tmp_path)})
    assert again.fleet.version == 1
    assert [replica.replica_id for replica in again.fleet.replicas if replica.can_serve] == ["engine-0", "engine-1"]


async def test_a_version_whose_canary_stays_late_says_so(updated: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Finding(Result.FAILED, "its canary was not answered in time", is_late=True)

    async def never(_: Canary, replicas: Sequence[Replica], version: int) -> dict[Replica, Finding]:
        return dict.fromkeys(replicas, late)

    monkeypatch.setattr(Canary, "admit", never)
    joiner = await joined(updated, await labelled("engine-2", 1))
    async with asyncio.timeout(20):
        while "was not answered in time" not in joiner.reason:
            await asyncio.sleep(0.02)
    assert joiner.reason == f"version 1 that it reports is not borne out: {late.reason}"
    assert joiner.is_unproven
