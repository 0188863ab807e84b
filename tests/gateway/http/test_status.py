"""Lost and missing replicas in the status report."""

from engines.engine import Json
from tests.rigs.rig import Rig


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
