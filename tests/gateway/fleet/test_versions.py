"""The labels of engines that join: which of them the fleet believes."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from engines.config import SimConfig
from engines.types import EngineKind
from engines.weight_label import open_label
from gateway.fleet.replica import Replica
from tests.rigs.calls import until
from tests.rigs.rig import Rig, SimReplica, StartRig

SIM = SimConfig(decode_step_s=0.0, decode_step_per_seq_s=0.0)
OURS, THEIRS = "5-0000000a", "7-0000000b"


async def labelled(replica_id: str, label: str, *, is_external: bool = False) -> SimReplica:
    replica = await SimReplica(replica_id, 5, SIM).start()
    replica.scheduler.hold_version(label)
    if is_external:
        replica.info = replace(replica.info, kind=EngineKind.EXTERNAL)
    return replica


@pytest.fixture
async def updated(rig: Rig) -> Rig:
    """Two replicas at version 1."""
    await rig.open_group()
    await rig.update()
    return rig


async def joined(rig: Rig, replica: SimReplica) -> Replica:
    """Return the replica once the fleet has welcomed it."""
    rig.replicas.append(replica)
    async with asyncio.timeout(20):
        while not (found := [one for one in rig.fleet.replicas if one.replica_id == replica.info.replica_id]):
            await asyncio.sleep(0.02)
    return found[0]


@pytest.mark.parametrize("label", [THEIRS, "1-0000000b", "1", open_label("1-0000000b", OURS)])
async def test_a_label_of_another_update_is_not_believed_also_of_the_same_number(updated: Rig, label: str) -> None:
    joiner = await joined(updated, await labelled("engine-2", label, is_external=True))
    assert (joiner.weight_version, updated.fleet.version) == (None, 1)
    assert await updated.states() == {"engine-0": "SERVING", "engine-1": "SERVING", "engine-2": "SYNCING"}
    reply = await updated.complete([[4, 5, 6]] * 6)
    assert {span["version"] for choice in reply["choices"] for span in choice["weight_versions"]} == {1}


async def test_a_joiner_with_the_fleets_label_serves_at_once(updated: Rig) -> None:
    joiner = await joined(updated, await labelled("engine-2", updated.fleet.label))
    assert (joiner.weight_version, joiner.can_serve) == (1, True)


async def test_engines_of_ours_are_believed_and_servers_of_others_beside_them_are_not(start_rig: StartRig) -> None:
    replicas = [await labelled("engine-0", OURS), await labelled("engine-1", THEIRS, is_external=True)]
    rig = await start_rig(2, replicas=replicas)
    assert [replica.weight_version for replica in rig.fleet.replicas] == [5, None]


async def test_where_no_engine_holds_the_version_before_the_store_has_it_by_its_label(
    start_rig: StartRig, tmp_path: Path
) -> None:
    rig = await start_rig(2, weights={"store": str(tmp_path)})
    await rig.open_group()
    await rig.update()
    made = rig.fleet.label
    await until(lambda: (tmp_path / f"v{made}").exists())
    await rig.stop_gateway()
    for replica in rig.replicas:
        replica.scheduler.hold_version(open_label("2-0000000b", made))
    again = await start_rig(2, replicas=rig.replicas, weights={"store": str(tmp_path)})
    await again.until({"engine-0": "SERVING", "engine-1": "SERVING"})
    assert (again.fleet.version, again.fleet.label, again.fleet.next_version) == (1, made, 2)
