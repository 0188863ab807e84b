"""Rolling updates: what is served while replicas take a version one after the other, and after one of them fails."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.replica import Replica
from gateway.weights.canary import Canary
from gateway.weights.verdicts import Finding
from sim.worker import SimWorker
from tests.rigs.calls import until
from tests.rigs.rig import Json, Rig, StartRig

Reply = tuple[int, Any]
THREE = {"engine-0": "SERVING", "engine-1": "SERVING", "engine-2": "SERVING"}


@pytest.fixture
def start(start_rig: StartRig, folder: Path) -> Callable[..., Coroutine[Any, Any, Rig]]:
    async def started(num_replicas: int = 3, *, weights: Json | None = None, **others: Any) -> Rig:
        return await start_rig(num_replicas, weights={"store": str(folder), **(weights or {})}, **others)

    return started


class Turns:
    """Lets replicas load one at a time, when the test says so."""

    def __init__(self) -> None:
        self._may_load = threading.Semaphore(0)

    def load(self, worker: SimWorker, path: str) -> None:
        assert self._may_load.acquire(timeout=20)

    def allow(self, loads: int) -> None:
        for _ in range(loads):
            self._may_load.release()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    turns = Turns()
    monkeypatch.setattr(SimWorker, "_load", lambda worker, path: turns.load(worker, path))
    return turns


def push(rig: Rig, folder: Path, **body: Any) -> Coroutine[Any, Any, Reply]:
    return rig.push(folder, **{"rolling": True, **body})


@asynccontextmanager
async def rolling(rig: Rig, folder: Path) -> AsyncIterator["asyncio.Task[Reply]"]:
    """A rolling update beside the test, from the moment on when it has begun."""
    pushing = asyncio.create_task(push(rig, folder))
    try:
        await until(lambda: rig.fleet.rolling_to is not None)
        yield pushing
    finally:
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)


async def held(rig: Rig) -> dict[str, int | None]:
    """The version of each replica that serves."""
    _, status = await rig.get("/status")
    return {r["replica_id"]: r["weight_version"] for r in status["replicas"] if r["state"] == "SERVING"}


async def until_held(rig: Rig, count: int, version: int) -> None:
    """Returns when so many replicas serve the version."""
    await until(lambda: held(rig), lambda got: list(got.values()).count(version) == count)


async def metrics(rig: Rig) -> str:
    async with rig.client.get(rig.url + "/metrics") as response:
        return await response.text()


async def said(rig: Rig, **body: Any) -> set[int]:
    """Versions of what the fleet answers, asked so often that every replica is."""
    choices = (await rig.complete([[4, 5, 6]] * 12, **body))["choices"]
    return {span["version"] for choice in choices for span in choice["weight_versions"]}


async def test_after_it_all_serve_the_version_and_the_record_says_how_long_each_was_away(
    start: StartRig, folder: Path
) -> None:
    rig = await start()
    assert await push(rig, folder) == (200, {"weight_version": 1})
    assert await held(rig) == dict.fromkeys(THREE, 1)
    assert await said(rig) == {1}
    _, updates = await rig.get("/v1/weight_updates")
    (record,) = updates["weight_updates"]
    assert (record["rolling"], record["end"], record["tensors"]) == (True, "committed", 1)
    assert set(record["seconds"]) == {"prepare", "load", "canary", "label"}
    results = [record["replicas"][name]["canary"]["result"] for name in sorted(record["replicas"])]
    assert sorted(results) == ["no peer", "verified", "verified"]
    assert all(replica["away_s"] > 0 for replica in record["replicas"].values())


async def test_so_many_leave_at_a_time_as_the_width_says_and_one_always_serves(
    start: StartRig, folder: Path, turns: Turns
) -> None:
    rig = await start(weights={"rolling_width": 5})
    async with rolling(rig, folder) as pushing:
        await until(lambda: held(rig), lambda got: len(got) == 1)
        await asyncio.sleep(0.1)
        assert list((await held(rig)).values()) == [0]
        turns.allow(3)
        assert (await pushing)[0] == 200


@pytest.mark.parametrize("demand", [{"min_version": 1}, {"max_staleness": 0}])
async def test_a_rollout_that_demands_the_coming_version_goes_to_those_that_have_it(
    start: StartRig, folder: Path, turns: Turns, demand: Json
) -> None:
    rig = await start()
    async with rolling(rig, folder) as pushing:
        await until_held(rig, 2, version=0)
        waiting = asyncio.create_task(said(rig, **demand))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert await said(rig, max_staleness=1) == {0}  # the others are not held up
        turns.allow(1)
        await until_held(rig, 1, version=1)
        await until_held(rig, 1, version=0)  # the next has left: what it gets before would wait there for its turn
        assert await waiting == {1}
        assert await said(rig, max_staleness=1) == {0, 1}
        assert await said(rig, **demand) == {1}
        turns.allow(2)
        assert (await pushing)[0] == 200


async def test_a_demand_that_is_not_met_in_time_is_refused_with_the_versions_there_are(
    start: StartRig, folder: Path, turns: Turns
) -> None:
    rig = await start(2, gateway={"queue_timeout_s": 0.3})
    async with rolling(rig, folder):
        status, reply = await rig.post("/v1/completions", {"prompt": [5], "max_staleness": 0})
        assert status == 504
        for told in ("demands version 1 or newer", "max_staleness = 0", "SERVING version 0", "the newest is 1"):
            assert told in reply["error"]["message"]
        turns.allow(2)


async def test_a_replica_that_fails_takes_the_version_from_those_that_had_taken_it(
    start: StartRig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await start(odd={"engine-2": {"corrupt_loads": True}})
    rig.fleet.replicas[2].load_tokens = 1  # its turn is the last
    check = Canary.check

    async def check_and_heal(self: Canary, *args: Any, **kwargs: Any) -> dict[Replica, Finding]:
        findings = await check(self, *args, **kwargs)
        if not all(finding.may_serve for finding in findings.values()):
            rig.replicas[2].heal()  # before it loads the version of before, alone with it
        return findings

    monkeypatch.setattr(Canary, "check", check_and_heal)
    status, reply = await push(rig, folder)
    assert (status, reply["error"]["replica_id"]) == (424, "engine-2")
    assert "2 replicas had taken the version and are restored" in reply["error"]["message"]
    await until_held(rig, 3, version=0)
    assert await said(rig) == {0}
    assert rig.fleet.rolling_to is None
    assert (await push(rig, folder))[1] == {"weight_version": 2}, "a number whose tokens were delivered is spent"


async def test_with_quorum_the_one_that_fails_is_fenced_and_the_update_goes_on(start: StartRig, folder: Path) -> None:
    rig = await start(4, weights={"must_pass": "quorum"}, odd={"engine-2": {"corrupt_loads": True}})
    rig.fleet.replicas[2].load_tokens = 1
    rig.fleet.replicas[3].load_tokens = 2
    assert (await push(rig, folder))[0] == 200
    assert await held(rig) == {"engine-0": 1, "engine-1": 1, "engine-3": 1}
    _, updates = await rig.get("/v1/weight_updates")
    assert updates["weight_updates"][0]["replicas"]["engine-2"]["canary"]["result"] == "failed"
    rig.replicas[2].heal()


async def test_a_pause_and_a_rolling_update_exclude_each_other(start: StartRig, folder: Path, turns: Turns) -> None:
    rig = await start(2)
    async with rolling(rig, folder) as pushing:
        status, reply = await rig.post("/pause?mode=keep", None)
        assert (status, "rolling update to version 1" in reply["error"]["message"]) == (409, True)
        status, reply = await rig.post("/start_weight_update", {})
        assert (status, "v1/weight_updates" in reply["error"]["message"]) == (409, True)
        turns.allow(2)
        assert (await pushing)[0] == 200
    await rig.post("/pause?mode=keep", None)
    status, reply = await push(rig, folder)
    assert (status, "/resume first" in reply["error"]["message"]) == (409, True)


async def test_what_a_push_leaves_out_is_as_the_configuration_says(start: StartRig, folder: Path) -> None:
    rig = await start(2, weights={"rolling": True})
    await push(rig, folder, rolling=None)
    await push(rig, folder, rolling=False)
    _, updates = await rig.get("/v1/weight_updates")
    assert [record["rolling"] for record in updates["weight_updates"]] == [False, True]
    status, reply = await push(rig, folder, rolling="yes")
    assert (status, reply["error"]["param"]) == (400, "rolling")


async def test_metrics_tell_who_serves_behind(start: StartRig, folder: Path, turns: Turns) -> None:
    rig = await start()
    async with rolling(rig, folder) as pushing:
        turns.allow(1)
        # One has the version, one is away to load it, and one waits for its turn.
        await until(lambda: metrics(rig), lambda got: "rollout_gateway_replicas_behind 1.0" in got)
        turns.allow(2)
        await pushing
    page = await metrics(rig)
    assert "rollout_gateway_replicas_behind 0.0" in page
    assert 'rollout_gateway_weight_update_seconds_count{step="away"} 3.0' in page
