"""Pauses of a trainer and freezes of an update on the same engines: each ends its own hold alone."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from engines.errors import EngineFailed
from engines.types import PauseMode
from sim.worker import SimWorker
from tests.rigs.calls import until
from tests.rigs.rig import Rig, StartRig

Reply = tuple[int, Any]
PROMPTS = [[5], [6]]


@pytest.fixture
def start(start_rig: StartRig, folder: Path) -> Callable[..., Coroutine[Any, Any, Rig]]:
    async def started(**weights: Any) -> Rig:
        return await start_rig(2, sim={"decode_step_s": 0.01}, weights={"store": str(folder), **weights})

    return started


@pytest.fixture
def may_load(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Engines load when the test sets it."""
    event = threading.Event()

    def load(worker: SimWorker, path: str) -> None:
        assert event.wait(20)

    monkeypatch.setattr(SimWorker, "_load", load)
    return event


async def overwritten(rig: Rig) -> None:
    """Returns when engines are being overwritten."""
    await until(lambda: all(replica.state == "UPDATING" for replica in rig.fleet.replicas))


def paused(rig: Rig) -> list[bool]:
    return [replica.is_paused for replica in rig.replicas]


async def generates(rig: Rig) -> None:
    """Fails where a rollout does not come back from each replica."""
    async with asyncio.timeout(30):
        await rig.complete(PROMPTS, max_tokens=2)
        await until(lambda: not any(paused(rig)))


async def test_a_resume_while_engines_are_overwritten_leaves_them_frozen(
    start: StartRig, folder: Path, may_load: threading.Event
) -> None:
    rig = await start()
    assert (await rig.post("/pause?mode=keep"))[0] == 200
    pushing = asyncio.create_task(rig.push(folder))
    await overwritten(rig)
    assert (await rig.post("/resume"))[0] == 200
    assert paused(rig) == [True, True]
    assert (await rig.get("/is_paused"))[1] == {"is_paused": False}
    may_load.set()
    assert (await pushing)[0] == 200
    await generates(rig)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_a_pause_in_the_middle_of_an_update_outlasts_it(
    start: StartRig, folder: Path, may_load: threading.Event, mode: str
) -> None:
    rig = await start()
    running = asyncio.create_task(rig.complete(PROMPTS, max_tokens=100, ignore_eos=True))
    await rig.begun(2)
    pushing = asyncio.create_task(rig.push(folder))
    await overwritten(rig)
    pausing = asyncio.create_task(rig.post(f"/pause?mode={mode}"))
    await until(lambda: all(len(replica.brake.holders) == 2 for replica in rig.fleet.replicas))
    rig.go_on()  # mode=wait waits for these samples' end
    may_load.set()
    if mode == "wait":
        rig.hurry()
    assert (await pushing)[0] == 200
    assert (await pausing)[0] == 200
    assert paused(rig) == [True, True]
    assert (await rig.post("/resume"))[0] == 200
    rig.hurry()
    await running
    await generates(rig)


async def refuse(mode: PauseMode, *, clear_cache: bool, timeout_s: float) -> None:
    raise EngineFailed("no pause today", replica_id="engine-1")


async def test_a_pause_that_fails_on_a_replica_holds_none(start: StartRig) -> None:
    rig = await start()
    rig.fleet.replicas[1].engine.pause = refuse  # type: ignore[method-assign]
    async with rig.client.post(f"{rig.url}/pause") as response:
        assert response.status == 424
        assert "no pause today" in await response.text()
    assert (await rig.get("/is_paused"))[1] == {"is_paused": False}
    await generates(rig)


@pytest.mark.parametrize("name", ["pause", "resume", "reset_prefix_cache"])
async def test_an_engine_that_dies_fails_no_call_on_all(
    start: StartRig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's client ends its run at an error, and empties the caches after each update."""
    rig = await start()
    if name == "resume":
        assert (await rig.post("/pause?mode=keep"))[0] == 200
    dying, engine = rig.replicas[1], rig.fleet.replicas[1].engine
    called = getattr(engine, name)

    async def die(*given: Any, **named: Any) -> Any:
        await dying.kill()
        return await called(*given, **named)

    monkeypatch.setattr(engine, name, die)
    assert (await rig.post(f"/{name}"))[0] == 200
    assert paused(rig)[0] == (name == "pause")
