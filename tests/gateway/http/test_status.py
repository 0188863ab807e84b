"""Lost and missing replicas in the status report."""

import time
from dataclasses import replace

from engines.engine import Json
from engines.types import EngineStart
from tests.rigs.rig import Rig, StartRig


async def test_a_missing_replica_has_a_row_with_the_reason_of_its_loss(rig: Rig) -> None:
    await rig.until({"engine-0": "SERVING", "engine-1": "SERVING"})
    assert (await rig.get("/status"))[1]["replicas_missing"] == []
    await rig.replicas.pop(0).kill()
    await rig.until({"engine-1": "SERVING"})
    _, report = await rig.get("/status")
    (missing,) = report["replicas_missing"]
    assert missing["group"] == "engine"
    assert missing["reason"].startswith("engine-0 was lost: ")
    assert report["replicas_lost"] == {"engine": 1}
    assert any(event["subject"] == "engine-0" and "-> LOST: " in event["text"] for event in report["events"])


async def test_the_start_of_a_successor_is_told_wherever_its_lack_is(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway={"queue_timeout_s": 0.5})
    await rig.until({"engine-0": "SERVING"})
    await rig.replicas.pop(0).kill()
    await rig.until({})
    began = time.time() - 7
    phases = ("importing", began), ("loading weights 3/8", began + 5)
    rig.fleet.starts.tell(EngineStart(replica_id="engine-0", group="engine", phases=phases))
    status, report = await rig.get("/health")
    (missing,) = report["replicas_missing"]
    assert (status, missing["replica_id"], missing["start"]["began"]) == (503, "engine-0", began)
    assert missing["start"]["phases"]["importing"] == 5.0
    assert missing["start"]["phases"]["loading weights 3/8"] >= 2
    assert missing["reason"].startswith("engine-0 was lost: ")
    said = "engine-0 starts: loading weights 3/8 for "
    assert said in missing["reason"]
    assert said in (await rig.post("/tokenize", {"prompt": "a"}))[1]["error"]["message"]
    rig.fleet.starts.tell(EngineStart(replica_id="engine-0", group="engine", phases=phases))
    assert said in (await rig.post("/v1/completions", {"prompt": [3]}))[1]["error"]["message"]
    await rig.add_replica("engine-0", seed=2)
    await rig.until({"engine-0": "SERVING"})
    report = (await rig.get("/status"))[1]
    assert report["replicas_missing"] == []


async def test_an_engine_that_starts_beyond_the_expected_ones_is_told_and_not_as_a_loss(rig: Rig) -> None:
    await rig.replicas.pop(0).kill()
    await rig.until({"engine-1": "SERVING"})
    await rig.add_replica("engine-2", seed=2)
    await rig.until({"engine-1": "SERVING", "engine-2": "SERVING"})
    rig.fleet.starts.tell(EngineStart(replica_id="engine-3", group="engine", phases=(("importing", time.time()),)))
    (starting,) = (await rig.get("/status"))[1]["replicas_missing"]
    assert starting["reason"].startswith("engine-3 starts: importing for ")


async def test_a_replica_tells_how_long_its_start_took(rig: Rig) -> None:
    info = replace(rig.fleet.replicas[0].info, started=110.0, phases=(("a", 100.0), ("b", 104.0), ("a", 105.0)))
    rig.fleet.replicas[0].info = info
    first, second = (await rig.get("/status"))[1]["replicas"]
    assert first["start"] == {"began": 100.0, "seconds": 10.0, "phases": {"b": 1.0, "a": 9.0}}
    assert second["start"] is None, "not told by these engines"


async def test_restarts_outlive_the_engine(rig: Rig) -> None:
    assert await restarts(rig) == {"engine-0": 0, "engine-1": 0}
    await rig.replicas.pop(0).kill()
    await rig.until({"engine-1": "SERVING"})
    await rig.add_replica("engine-abc", seed=2)
    await rig.until({"engine-1": "SERVING", "engine-abc": "SERVING"})
    assert await restarts(rig) == {"engine-0": 1, "engine-1": 0}
    async with rig.client.get(rig.url + "/metrics") as response:
        assert 'rollout_gateway_replica_restarts_total{replica="engine-0"} 1.0' in await response.text()


async def test_a_replica_that_serve_removed_and_scaled_up_again_is_no_restart(rig: Rig) -> None:
    rig.fleet.drain("engine-0")
    await rig.replicas.pop(0).kill()
    await rig.until({"engine-1": "SERVING"})
    await rig.add_replica("engine-abc", seed=2)
    await rig.until({"engine-1": "SERVING", "engine-abc": "SERVING"})
    assert await restarts(rig) == {"engine-0": 0, "engine-1": 0}


async def restarts(rig: Rig) -> dict[str, int]:
    return {one["label"]: one["restarts"] for one in (await rig.get("/status"))[1]["replicas"]}


async def test_an_update_is_one_event_and_a_death_stays_in_sight_of_many(rig: Rig) -> None:
    await rig.open_group()
    await rig.replicas.pop(0).kill()
    await rig.until({"engine-1": "SERVING"})
    await rig.open_group()
    before = await events(rig)
    for _ in range(5):
        await rig.update()
    new = [event for event in await events(rig) if event not in before]
    assert [(event["subject"], event["text"].split(" in ")[0]) for event in new] == [
        (f"version {version}", "committed over sim") for version in (3, 4, 5)
    ], "the last three"
    assert any(event["subject"] == "engine-0" and "-> LOST" in event["text"] for event in await events(rig))


async def events(rig: Rig) -> list[Json]:
    found: list[Json] = (await rig.get("/status"))[1]["events"]
    return found
