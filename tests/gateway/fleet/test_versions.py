"""The versions that engines report as they join: which of them the fleet believes."""

import asyncio
from pathlib import Path

import pytest

from engines.config import SimConfig
from tests.rigs.rig import SimReplica, StartRig

SIM = SimConfig(decode_step_s=0.0, decode_step_per_seq_s=0.0)


async def labelled(replica_id: str, version: int) -> SimReplica:
    replica = await SimReplica(replica_id, 5, SIM).start()
    if version:
        replica.label(version)
    return replica


async def test_a_label_of_another_run_does_not_take_a_fleet_over(start_rig: StartRig) -> None:
    rig = await start_rig(2)
    await rig.open_group()
    await rig.update()
    rig.replicas.append(await labelled("engine-2", 7))
    async with asyncio.timeout(20):
        while len(rig.fleet.replicas) < 3:
            await asyncio.sleep(0.02)
    assert rig.fleet.version == 1
    assert await rig.states() == {"engine-0": "SERVING", "engine-1": "SERVING", "engine-2": "SYNCING"}
    reply = await rig.complete([[4, 5, 6]] * 6)
    assert {span["version"] for choice in reply["choices"] for span in choice["weight_versions"]} == {1}


@pytest.mark.parametrize(("labels", "version"), [([5, 5, 0], 5), ([5, 0], 5), ([7, 0, 0], 0), ([7, 3, 3], 3)], ids=str)
async def test_a_restarted_gateway_without_a_store_believes_what_most_engines_report(
    start_rig: StartRig, labels: list[int], version: int
) -> None:
    replicas = [await labelled(f"engine-{index}", label) for index, label in enumerate(labels)]
    rig = await start_rig(len(labels), replicas=replicas)
    assert rig.fleet.version == version
    serving = [replica.replica_id for replica in rig.fleet.replicas if replica.can_serve]
    assert serving[0] == next(f"engine-{index}" for index, label in enumerate(labels) if label == version)
    assert all(replica.weight_version in (None, 0, version) for replica in rig.fleet.replicas)


async def test_a_record_outweighs_the_labels_of_others(start_rig: StartRig, tmp_path: Path) -> None:
    rig = await start_rig(2, weights={"store": str(tmp_path)})
    await rig.open_group()
    await rig.update()
    await rig.stop_gateway()
    strays = [await labelled(f"engine-{index}", 7) for index in (2, 3, 4)]
    again = await start_rig(5, replicas=[*strays, *rig.replicas], weights={"store": str(tmp_path)})
    assert again.fleet.version == 1
    assert [replica.replica_id for replica in again.fleet.replicas if replica.can_serve] == ["engine-0", "engine-1"]
