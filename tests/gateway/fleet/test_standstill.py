"""An engine whose tokens stand still while it answers /health is found, and its rollouts move."""

import asyncio

import pytest

from engines.errors import DeadlineExceeded, EngineUnreachable
from engines.types import PauseMode
from gateway.config.schema import FleetConfig
from gateway.fleet.brake import Holder
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica
from gateway.fleet.standstill import Standstill
from tests.rigs.rig import FAST_WATCH, Json, Rig, StartRig

WATCH: Json = FAST_WATCH | {"stalled_after_s": 1.0, "lost_after_s": 60.0}


async def placed(rig: Rig, samples: int) -> None:
    """Returns when replicas have so many samples."""
    async with asyncio.timeout(20):
        while sum(replica.load_samples for replica in rig.fleet.replicas) < samples:
            await asyncio.sleep(0.01)


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


async def test_a_silent_engine_is_probed_no_longer_than_until_its_rollouts_are_to_move(start_rig: StartRig) -> None:
    watch = WATCH | {"stalled_after_s": 10.0, "probe_timeout_s": 30.0, "probe_interval_s": 60.0}
    rig = await start_rig(1, fleet=watch)
    task = asyncio.create_task(rig.complete([[5]], max_tokens=60, ignore_eos=True))
    await rig.begun()
    (replica,) = rig.fleet.replicas
    assert rig.fleet._patience_s(replica) == 30.0
    rig.fleet.suspect(replica, "no answer to a probe")
    assert rig.fleet._patience_s(replica) < 11.0
    rig.fleet.settle(replica, "answers again")
    assert rig.fleet._patience_s(replica) == 30.0
    replica.answered_at -= 31.0  # a probe was missed that had been sent before the last token came
    assert rig.fleet._patience_s(replica) < 1.0
    rig.hurry()
    await task


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


async def test_a_silence_of_most_engines_at_once_moves_no_rollouts_before_the_bound_of_a_standstill(
    start_rig: StartRig,
) -> None:
    rig = await start_rig(4, fleet=WATCH | {"stalled_after_s": 10.0, "probe_timeout_s": 2.0, "probe_interval_s": 60.0})
    first, *others = rig.fleet.replicas
    assert rig.fleet._moves_after_s(first) == 2.0
    others[0].answered_at -= 5.0
    assert rig.fleet._moves_after_s(first) == 2.0
    others[1].answered_at -= 5.0
    assert rig.fleet._moves_after_s(first) == 10.0


async def test_a_late_answer_is_evidence_after_a_silence_without_tokens_alone(start_rig: StartRig) -> None:
    rig = await start_rig(2, fleet=WATCH | {"stalled_after_s": 60.0, "probe_timeout_s": 60.0, "probe_interval_s": 60.0})
    replica, _ = rig.fleet.replicas
    late, broken = DeadlineExceeded("no answer to /health"), EngineUnreachable("reset", replica_id="engine-0")
    replica.answered_at -= 120.0
    assert rig.fleet._is_evidence(replica, late)
    replica.saw_progress()  # a token came meanwhile
    assert not rig.fleet._is_evidence(replica, late)
    assert rig.fleet._is_evidence(replica, broken)


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


async def test_a_wedged_engine_whose_host_vanishes_is_lost_before_serve_delists_it(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await start_rig(2, sim={"decode_step_s": 0.01}, fleet=WATCH | {"lost_after_s": 1.0, "probe_timeout_s": 0.5})
    task = asyncio.create_task(rig.complete([[5], [6]], max_tokens=60, ignore_eos=True))
    await placed(rig, 2)
    wedged = rig.fleet.replicas[0]
    rig.replicas[0].inject(wedged=True)
    rig.go_on()
    await rig.until({"engine-0": "SUSPECT", "engine-1": "SERVING"})
    assert wedged.suspect_since is not None
    async with asyncio.timeout(20):
        while wedged.answered_at < wedged.suspect_since + 2 * 1.0:  # it answers its probes, and is kept
            await asyncio.sleep(0.02)
    assert wedged.state == "SUSPECT"
    monkeypatch.setattr(wedged.engine, "health", silent)
    async with asyncio.timeout(20):
        while wedged.state != "LOST":
            await asyncio.sleep(0.02)
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


async def test_a_wedged_engine_is_found_while_an_update_waits_for_its_rollouts(start_rig: StartRig) -> None:
    rig = await start_rig(2, sim={"decode_step_s": 0.01}, fleet=WATCH)
    await rig.open_group()
    task = asyncio.create_task(rig.complete([[5], [6]], max_tokens=60, ignore_eos=True))
    await placed(rig, 2)
    rig.replicas[0].inject(wedged=True)
    start = asyncio.create_task(rig.post("/start_weight_update", {"in_flight": "drain"}))
    await rig.until({"engine-0": "SUSPECT", "engine-1": "SERVING"})
    assert (await start)[0] == 200  # the rollout of the wedged engine goes on after the update
    task.cancel()


async def test_a_call_on_a_held_engine_outlasts_probes_without_answer(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await start_rig(1, fleet=WATCH | {"stalled_after_s": 0.2})
    replica = rig.fleet.replicas[0]
    replica.reserve(Rollout(request_id="a", model="sim", n=1, tokens=1))
    await replica.brake.stop(Holder.UPDATE, PauseMode.KEEP, clear_cache=False, timeout_s=5.0)
    monkeypatch.setattr(replica.engine, "health", silent)
    load = asyncio.create_task(replica.unless_lost(asyncio.Event().wait()))
    await rig.until({"engine-0": "SUSPECT"})
    await asyncio.sleep(0.6)
    assert not load.done()
    load.cancel()


async def silent(timeout_s: float) -> None:
    raise DeadlineExceeded("no answer to /health")


async def test_a_watch_that_fails_makes_the_gateway_unhealthy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(replica: Replica) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rig.fleet, "_vouched", broken)
    async with asyncio.timeout(20):
        while (await rig.get("/health"))[0] != 503:
            await asyncio.sleep(0.01)


async def test_tokens_of_sglangs_unfinished_requests_are_progress(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await start_rig(1, fleet=WATCH | {"stalled_after_s": 600.0})
    task = asyncio.create_task(rig.complete([[5]], max_tokens=60, ignore_eos=True))
    await rig.begun()
    (replica,) = rig.fleet.replicas
    made = 100

    async def page(_: float) -> str:
        return f'sglang:generation_tokens_total 5.0\nsglang:realtime_tokens_total{{mode="decode"}} {made}\n'

    monkeypatch.setattr(replica.engine, "metrics", page)
    standstill = Standstill(FleetConfig(stalled_after_s=60.0))
    replica._progress_at -= 50.0
    assert await standstill.look(replica) is None
    replica._progress_at -= 50.0
    made += 40
    assert await standstill.look(replica) is None
    replica._progress_at -= 50.0
    assert await standstill.look(replica) is None
    replica._progress_at -= 50.0
    failed = await standstill.look(replica)
    assert failed is not None
    assert "stand still" in str(failed)
    replica.is_stalled = False
    rig.hurry()
    await task
