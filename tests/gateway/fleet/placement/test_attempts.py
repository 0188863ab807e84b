"""An attempt that fails ends in one of few ways, and a rollout has a bounded number of attempts."""

import asyncio
from copy import copy
from typing import Any

import pytest

from engines.engine import Engine
from engines.errors import (
    EngineFailed,
    EngineGone,
    EngineOverwritten,
    EngineRefused,
    EngineUnreachable,
)
from engines.types import ReplicaState
from gateway.fleet.placement.attempts import Attempts, End, end_of
from tests.rigs.rig import Json, Rig, StartRig

ASKED: Json = {"model": "sim", "prompt": [[5, 6]], "max_tokens": 4}


def refused(status: int) -> EngineRefused:
    return EngineRefused("no", status=status, body={})


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (refused(400), End.REFUSED),
        (refused(422), End.REFUSED),
        (refused(401), End.FAILED),
        (refused(403), End.FAILED),
        (refused(404), End.FAILED),
        (refused(408), End.FAILED),
        (refused(429), End.BUSY),
        (EngineFailed("500"), End.FAILED),
        (EngineGone("refused"), End.FAILED),
        (EngineOverwritten("a refused update"), End.CUT_OFF),
    ],
)
def test_an_error_is_the_fault_of_the_request_or_of_the_replica(error: Any, end: End) -> None:
    assert end_of(error, cuts_off=False) is end


def test_attempts_are_bounded_by_time_too() -> None:
    attempts = Attempts(began=-1e9)
    with pytest.raises(EngineFailed, match="generate_timeout_s"):
        attempts.check(EngineFailed("500"), max_attempts=3, longest_s=60)


def test_more_than_three_engines_lost_in_updates_are_held_against_the_prompt() -> None:
    attempts = Attempts()
    assert [attempts.lost_in_update() for _ in range(4)] == [End.CUT_OFF] * 3 + [End.FAILED]
    assert copy(attempts).lost_in_update() is End.FAILED


@pytest.mark.parametrize("num_replicas", [1, 3])
async def test_a_request_that_every_engine_fails_on_is_answered_after_three_attempts(
    start_rig: StartRig, num_replicas: int
) -> None:
    rig = await start_rig(num_replicas)
    for replica in rig.replicas:
        replica.inject(status=500)
    async with asyncio.timeout(20):
        status, reply = await rig.post("/v1/completions", ASKED)
    assert status == 502
    assert "after 3 attempts" in reply["error"]["message"]
    assert set((await rig.states()).values()) == {"SERVING"}  # a 500 while health is good suspects nobody


@pytest.mark.parametrize(
    "faults",
    [
        {"status": 429},
        {"status": 429, "retry_after_s": 30},
        {"status": 401},
        {"status": 404},
        {"status": 503},
        {"garbage": True},
    ],
)
async def test_a_replica_that_refuses_everything_costs_no_completion(rig: Rig, faults: Json) -> None:
    rig.replicas[0].inject(**faults)
    for _ in range(4):
        replies = await asyncio.gather(*(rig.post("/v1/completions", ASKED) for _ in range(10)))
        assert [status for status, _ in replies] == [200] * 10
    assert (await rig.states())["engine-0"] == "SERVING"


async def test_a_replica_that_had_no_room_serves_again_after_its_pause(start_rig: StartRig) -> None:
    rig = await start_rig(1)
    rig.replicas[0].inject(status=429, retry_after_s=1)
    asked = asyncio.create_task(rig.post("/v1/completions", ASKED))
    async with asyncio.timeout(30):
        while not rig.fleet.replicas[0].backoff.left_s:
            await asyncio.sleep(0.01)
        rig.replicas[0].inject()
        assert (await asked)[0] == 200


async def test_a_vllm_whose_core_has_died_is_left_at_its_first_500(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its API server answers 500, and 503 to /health, until it ends."""
    rig = await start_rig(1)
    dead = EngineFailed("the engine is dead")
    dead.status = 503

    async def health(engine: Engine, timeout_s: float) -> None:
        raise dead

    rig.replicas[0].inject(status=500)
    with monkeypatch.context() as patch:
        patch.setattr(type(rig.fleet.replicas[0].engine), "health", health)
        asked = asyncio.create_task(rig.post("/v1/completions", ASKED, headers={"X-Request-Id": "lone"}))
        await rig.in_line()
        rig.replicas[0].inject()
    assert (await asked)[0] == 200
    [rollout] = (await rig.get("/traces/lone"))[1]["rollouts"]
    assert [attempt["end"] for attempt in rollout["attempts"]] == ["failed", "answered"]


async def test_a_prompt_that_kills_its_engine_ends_two_replicas_and_no_more(start_rig: StartRig) -> None:
    rig = await start_rig(4)
    for replica in rig.replicas:
        replica.inject(deadly_prompt="poison")
    async with asyncio.timeout(30):
        status, reply = await rig.post("/v1/completions", ASKED | {"prompt": "poison"})
    assert (status, reply["error"]["type"]) == (400, "BadRequestError")
    assert "died under this prompt" in reply["error"]["message"]
    assert sum(replica.can_serve for replica in rig.fleet.replicas) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 3])
async def test_a_request_that_engines_answer_with_500_while_they_serve_others_is_at_fault_itself(
    start_rig: StartRig, num_replicas: int, stream: bool
) -> None:
    rig = await start_rig(num_replicas)
    for replica in rig.replicas:
        replica.inject(status=500, status_for="no grammar")
    schema = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"no grammar": 1}}}}
    async with asyncio.timeout(20):
        status, reply = await rig.post("/v1/completions", ASKED | schema | {"stream": stream})
    assert (status, reply["error"]["code"]) == (400, 400)
    assert "injected fault 500" in reply["error"]["message"]
    assert len((await rig.complete([[5, 6]]))["choices"]) == 1


async def test_a_connection_that_broke_suspects_nobody_while_health_is_good(rig: Rig) -> None:
    replica = rig.fleet.replicas[0]
    assert not await rig.fleet.examine(replica, EngineUnreachable("reset"))
    assert replica.state is ReplicaState.SERVING


async def test_an_engine_whose_port_is_closed_is_lost_with_the_first_connection_that_broke(start_rig: StartRig) -> None:
    rig = await start_rig(2, fleet={"probe_interval_s": 60.0})
    await rig.replicas[0].kill()
    replica = rig.fleet.replicas[0]
    assert await rig.fleet.examine(replica, EngineUnreachable("reset"))
    assert replica.state is ReplicaState.LOST
