"""Records of weight updates: what they say, where they are shown, how many are kept."""

import pytest

from engines.types import InFlight
from gateway.cli.output import describe_update
from gateway.fleet.history import Events
from gateway.fleet.metrics import Metrics
from gateway.weights.updates.record import KEPT, Phase, UpdateLog, UpdateRecord, num_bytes
from tests.rigs.rig import FAST_WATCH, Json, Rig, StartRig


async def records(rig: Rig) -> list[Json]:
    status, reply = await rig.get("/v1/weight_updates")
    assert status == 200
    updates: list[Json] = reply["weight_updates"]
    return updates


STEPS = {"store", "receipt", "pause", "begin", "transfer", "digests", "load", "canary", "label"}


async def test_an_update_leaves_a_record_with_steps_bytes_and_what_each_replica_holds(rig: Rig) -> None:
    assert (await rig.get("/status"))[1]["last_weight_update"] is None
    await rig.open_group()
    await rig.update()
    await rig.update()
    newest, oldest = await records(rig)
    assert (newest["version"], oldest["version"]) == (2, 1)
    assert set(newest["seconds"]) == STEPS
    assert sum(newest["seconds"].values()) <= newest["age_s"]
    assert (newest["end"], newest["transport"], newest["tensors"], newest["bytes"]) == ("committed", "sim", 1, 64)
    assert newest["error"] is None
    for replica in newest["replicas"].values():
        assert (replica["state"], replica["weight_version"]) == ("SERVING", 2)
        assert replica["canary"]["result"] == "verified"
        assert replica["canary"]["to_peers"] <= replica["canary"]["tolerance"] < replica["canary"]["to_previous"]
    status = (await rig.get("/status"))[1]
    assert (status["weight_update"], status["last_weight_update"]["version"]) == (None, 2)
    line = describe_update(status["last_weight_update"])
    assert line.startswith("version 2 committed over sim in ")
    assert "canary: 2 verified; not staged: no room for 0.0 GB" in line
    async with rig.client.get(rig.url + "/metrics") as response:
        page = await response.text()
    assert 'rollout_gateway_weight_updates_total{end="committed"} 2.0' in page
    for step in (*STEPS, "whole"):
        assert f'rollout_gateway_weight_update_seconds_count{{step="{step}"}} 2.0' in page


async def test_an_update_that_fails_leaves_a_record_with_its_error(start_rig: StartRig) -> None:
    rig = await start_rig(fleet=FAST_WATCH | {"probe_interval_s": 5.0})  # the update finds the death, no probe
    await rig.open_group()
    await rig.post("/start_weight_update", {})
    await rig.replicas[0].kill()
    await rig.post("/update_weights", {"update_info": rig.tensors})
    (record,) = await records(rig)
    assert (record["end"], record["version"]) == ("aborted", 1)
    assert "engine-0" in record["error"]
    assert record["replicas"] == {}, "it was found out before any was touched"


async def test_an_update_that_runs_stands_first_and_has_no_end(rig: Rig) -> None:
    await rig.open_group()
    await rig.update()
    await rig.post("/start_weight_update", {})
    running, ended = await records(rig)
    assert (running["version"], running["phase"], running["end"]) == (2, "OPEN", None)
    assert ended["end"] == "committed"


def test_only_the_last_ones_are_kept() -> None:
    updates = UpdateLog(Metrics(), Events())
    for version in range(KEPT + 5):
        update = UpdateRecord(version, "sim", InFlight.KEEP)
        update.end(Phase.COMMITTED)
        updates.add(update)
    assert [report["version"] for report in updates.reports()] == list(range(KEPT + 4, 4, -1))


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1), ("int64", 8), ("uint8", 1), ("bool", 1)]
)
def test_bytes_follow_from_dtypes_and_shapes(dtype: str, size: int) -> None:
    assert num_bytes({"dtype_names": [dtype, dtype], "shapes": [[2, 3], []]}) == 7 * size
