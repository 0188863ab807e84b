"""An engine is told to end what it has, until nothing is in flight on its replica."""

import asyncio

import pytest

from engines.errors import EngineOverwritten, EngineUnreachable
from engines.types import PauseMode
from gateway.fleet import stopped as module
from gateway.fleet.brake import Holder
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica
from gateway.fleet.stopped import cut_off
from tests.rigs.rig import StartRig

ROLLOUT = Rollout(request_id="a", model="sim", n=1, tokens=1)


@pytest.fixture
async def replica(start_rig: StartRig, monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setattr(module, "_AGAIN_S", 0.02)
    return (await start_rig(1)).fleet.replicas[0]


class Pauses:
    """Stands where the engine's pause stands. It ends the requests that it meets with its `ends_at`-th call."""

    def __init__(self, replica: Replica, ends_at: int) -> None:
        self.modes: list[PauseMode] = []
        self.requests: list[asyncio.Event] = []
        self._ends_at = ends_at
        replica.engine.pause = self.pause  # type: ignore[method-assign]

    async def pause(self, mode: PauseMode, *, clear_cache: bool, timeout_s: float) -> None:
        assert not clear_cache
        self.modes.append(mode)
        if len(self.modes) == self._ends_at:
            for request in self.requests:
                request.set()


async def carried(replica: Replica, pauses: Pauses) -> str:
    """A rollout that is on the replica until it is ended there, or dropped."""
    replica.reserve(ROLLOUT)
    ended = asyncio.Event()
    pauses.requests.append(ended)
    with replica.carrying(ROLLOUT):
        try:
            await replica.unless_lost(ended.wait())
        except EngineOverwritten:
            return "cut off"
        except EngineUnreachable:
            return "dropped" if replica.cuts_off else "lost"
        return "cut off" if replica.cuts_off else "ended"


@pytest.mark.parametrize("ends_at", [1, 3])
async def test_what_comes_late_is_ended_with_another_call(replica: Replica, ends_at: int) -> None:
    pauses = Pauses(replica, ends_at)
    running = asyncio.create_task(carried(replica, pauses))
    await asyncio.sleep(0)
    await asyncio.wait_for(cut_off(replica, by=Holder.UPDATE, timeout_s=1.0), 30)
    assert await running == "cut off"
    assert len(pauses.modes) == ends_at


async def test_what_the_engine_ends_is_a_cut_also_where_the_update_is_given_up_meanwhile(replica: Replica) -> None:
    pauses = Pauses(replica, ends_at=10_000)
    running = asyncio.create_task(carried(replica, pauses))
    await asyncio.sleep(0)
    cutting = asyncio.create_task(cut_off(replica, by=Holder.UPDATE, timeout_s=1.0))
    while not pauses.modes:
        await asyncio.sleep(0)
    cutting.cancel()
    assert await asyncio.wait_for(running, 20) == "cut off"
    await asyncio.gather(cutting, return_exceptions=True)
    assert not replica.cuts_off
