"""An engine whose tokens stand still while it answers /health is found, and its rollouts move."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from engines.engine import Engine
from gateway.config.schema import FleetConfig
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.watch import evidence
from gateway.fleet.watch.standstill import Standstill
from tests.rigs.calls import until
from tests.rigs.rig import FAST_WATCH, Json, Rig, StartRig
from tests.rigs.stories.played_fleet import PlayedFleet

WATCH: Json = FAST_WATCH | {"stalled_after_s": 1.0, "lost_after_s": 60.0}


async def placed(rig: Rig, samples: int) -> None:
    """Returns when replicas have so many samples."""
    await until(lambda: sum(replica.load_samples for replica in rig.fleet.replicas) >= samples)


async def test_rollouts_of_a_wedged_engine_move_to_another(start_rig: StartRig) -> None:
    rig = await start_rig(2, sim={"decode_step_s": 0.01}, fleet=WATCH)
    tasks = [asyncio.create_task(rig.complete([[5, index]], max_tokens=60, ignore_eos=True)) for index in range(8)]
    await placed(rig, 8)
    rig.replicas[0].inject(wedged=True)
    rig.go_on()
    async with asyncio.timeout(20):
        replies = await asyncio.gather(*tasks)
    assert all(len(reply["choices"][0]["token_ids"]) == 60 for reply in replies)
    assert await rig.states() == {"engine-0": "SUSPECT", "engine-1": "SERVING"}
    assert "stand still" in rig.fleet.replicas[0].reason or "no answer" in rig.fleet.replicas[0].reason


async def test_rollouts_of_a_silent_engine_move_after_one_missed_probe_while_the_others_answer(
    start_rig: StartRig,
) -> None:
    watch = WATCH | {"stalled_after_s": 600.0, "lost_after_s": 600.0, "probe_timeout_s": 0.5}
    rig = await start_rig(3, fleet=watch)
    tasks = [asyncio.create_task(rig.complete([[5, index]], max_tokens=60, ignore_eos=True)) for index in range(6)]
    await rig.begun()
    rig.replicas[0].inject(black_hole=True)
    rig.go_on()
    async with asyncio.timeout(60):
        replies = await asyncio.gather(*tasks)
    assert all(len(reply["choices"][0]["token_ids"]) == 60 for reply in replies)
    assert (await rig.states())["engine-0"] == "SUSPECT"


async def test_a_wedged_engine_serves_again_once_it_has_made_a_token(start_rig: StartRig) -> None:
    rig = await start_rig(2, sim={"decode_step_s": 0.01}, fleet=WATCH)
    task = asyncio.create_task(rig.complete([[5], [6]], max_tokens=60, ignore_eos=True))
    await placed(rig, 2)
    rig.replicas[0].inject(wedged=True)
    rig.go_on()
    await rig.until({"engine-0": "SUSPECT", "engine-1": "SERVING"})
    rig.replicas[0].inject()
    await rig.until({"engine-0": "SERVING", "engine-1": "SERVING"})
    await task


async def test_a_paused_engine_is_not_taken_for_wedged(start_rig: StartRig) -> None:
    rig = await start_rig(2, sim={"decode_step_s": 0.01}, fleet=WATCH | {"stalled_after_s": 0.3})
    task = asyncio.create_task(rig.complete([[5]], max_tokens=60, ignore_eos=True))
    await placed(rig, 1)
    assert (await rig.post("/pause?mode=keep"))[0] == 200
    rig.go_on()
    await asyncio.sleep(1.0)
    assert await rig.states() == {"engine-0": "SERVING", "engine-1": "SERVING"}
    assert (await rig.post("/resume"))[0] == 200
    await task


class PlayedReplica:
    """A replica in played time, whose engine reports `made` tokens, and its watch with a bound of 10 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 100.0
        self._now = 1000.0
        monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: self._now))
        (self.replica,) = PlayedFleet([cast(Engine, self)]).replicas
        self.standstill = Standstill(FleetConfig(stalled_after_s=10.0))

    async def metrics(self, timeout_s: float) -> str:
        return f"vllm:generation_tokens_total {self.made}\n"

    async def looks(self, seconds: int) -> bool:
        """True if a look a second finds a standstill in this time."""
        for _ in range(seconds):
            self._now += 1.0
            if await self.standstill.look(self.replica) is not None:
                return True
        return False

    async def gives_up_after(self, seconds: int, prompt_tokens: int = 1) -> bool:
        """True if a standstill is found within a rollout that its client gives up, or in a minute without any."""
        rollout = Rollout(request_id="a", model="m", n=1, tokens=1, prompt_tokens=prompt_tokens)
        self.replica.reserve(rollout)
        is_found = await self.looks(seconds)
        self.replica.release(rollout, asyncio.CancelledError())
        return is_found or await self.looks(60)


async def test_a_standstill_is_counted_under_load_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedReplica(monkeypatch)
    assert not await played.looks(3600)
    assert [await played.gives_up_after(3) for _ in range(4)] == [False, False, False, True]


async def test_clients_that_give_up_on_a_slow_engine_are_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedReplica(monkeypatch)
    for _ in range(20):
        assert not await played.gives_up_after(4)
        played.made += 1.0


async def test_a_long_prompt_that_was_given_up_is_no_standstill_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedReplica(monkeypatch)
    assert not await played.gives_up_after(20, prompt_tokens=20_000)
    assert not await played.gives_up_after(9)
    played.replica.evidence.saw_progress()
    assert not await played.gives_up_after(9)
    assert await played.gives_up_after(2)


async def test_tokens_of_sglangs_unfinished_requests_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedReplica(monkeypatch)

    async def page(_: float) -> str:
        return f'sglang:generation_tokens_total 5.0\nsglang:realtime_tokens_total{{mode="decode"}} {played.made}\n'

    monkeypatch.setattr(played, "metrics", page)
    played.replica.reserve(Rollout(request_id="a", model="m", n=1, tokens=1))
    for _ in range(3):
        assert not await played.looks(9)
        played.made += 40.0
    assert await played.looks(20)
