"""The record of a rollout's life."""

import asyncio

import pytest

from gateway.fleet.placement import attempt_history
from tests.rigs.calls import until
from tests.rigs.openai_server import OpenAiServer
from tests.rigs.rig import Json, Rig, StartRig

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def life_of(rig: Rig, request_id: str) -> Json:
    status, found = await rig.get(f"/traces/{request_id}")
    assert status == 200, found
    return found


async def test_each_prompt_of_a_request_has_its_attempts(rig: Rig) -> None:
    body = {"prompt": [[3], [4]], "max_tokens": 4, "n": 2}
    _, reply = await rig.post("/v1/completions", body, headers={"X-Request-Id": "mine"})
    found = await life_of(rig, "mine")
    assert [life["rollout"] for life in found["rollouts"]] == ["mine-0", "mine-1"]
    assert found["rollouts"] == (await life_of(rig, reply["id"]))["rollouts"]
    for life in found["rollouts"]:
        assert (life["model"], life["samples"], life["goes_on"]) == ("sim", 2, False)
        (attempt,) = life["attempts"]
        assert attempt["queued"] <= attempt["placed"] <= attempt["ended"]
        assert attempt["weight_versions"] == [0, 0]
        assert (attempt["end"], attempt["error"]) == ("answered", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_death_shows_as_a_failed_attempt_and_the_way_on(start_rig: StartRig, stream: bool) -> None:
    rig = await start_rig(2, sim={"mean_tokens": 100_000})
    body = {"prompt": [3], "max_tokens": 32, "ignore_eos": True, "stream": stream}

    async def generate() -> int:
        async with rig.client.post(rig.url + "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as reply:
            await reply.read()
            return reply.status

    running = asyncio.create_task(generate())
    await rig.begun()
    (busy,) = [replica for replica in rig.replicas if replica.scheduler.stalled]
    await busy.kill()
    rig.hurry()
    assert await running == 200
    rollouts = (await life_of(rig, "mine"))["rollouts"]
    first = rollouts[0]["attempts"][0]
    assert (first["replica"], first["end"]) == (busy.info.replica_id, "failed")
    assert busy.info.replica_id in first["error"]
    last = rollouts[-1]["attempts"][-1]
    assert last["end"] == "answered"
    assert last["replica"] != busy.info.replica_id


async def test_a_client_that_leaves_and_a_rollout_that_runs_are_told_apart(start_rig: StartRig) -> None:
    rig = await start_rig(1, sim={"mean_tokens": 100_000})
    body = {"prompt": [3], "max_tokens": 32, "ignore_eos": True}
    running = asyncio.create_task(rig.post("/v1/completions", body, headers={"X-Request-Id": "mine"}))
    await rig.begun()
    assert (await life_of(rig, "mine"))["rollouts"][0]["attempts"][0]["ended"] is None
    running.cancel()
    given_up = "given up by the client"
    await until(lambda: life_of(rig, "mine"), lambda got: got["rollouts"][0]["attempts"][0]["end"] == given_up)


async def test_a_rollout_that_no_replica_takes_in_time_has_expired(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway={"queue_timeout_s": 0.1})
    await rig.post("/pause?mode=keep")
    await rig.post("/v1/completions", {"prompt": [3]}, headers={"X-Request-Id": "mine"})
    (attempt,) = (await life_of(rig, "mine"))["rollouts"][0]["attempts"]
    assert (attempt["end"], attempt["placed"], attempt["replica"]) == ("expired", None, None)
    assert "gateway.queue_timeout_s" in attempt["error"]


async def test_an_unknown_request_is_404_and_the_record_is_bounded(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_history, "KEPT", 3)
    rig = await start_rig(1)
    status, reply = await rig.get("/traces/nobody")
    assert (status, "X-Request-Id" in reply["error"]["message"]) == (404, True)
    for name in "abcde":
        await rig.post("/v1/completions", {"prompt": [3], "max_tokens": 1}, headers={"X-Request-Id": name})
    assert [(await rig.get(f"/traces/{name}"))[0] for name in "abcde"] == [404, 404, 200, 200, 200]


@pytest.mark.parametrize(("sent", "passed"), [(PARENT, PARENT), ("nonsense", None), (None, None)])
async def test_the_trace_context_reaches_the_engine_and_the_record(
    start_rig: StartRig, sent: str | None, passed: str | None
) -> None:
    server = await OpenAiServer([], "").start()
    try:
        rig = await start_rig(engine={"kind": "external", "url": server.url, "model": "gpt"})
        headers = {"X-Request-Id": "mine"} | ({"traceparent": sent} if sent else {})
        status, reply = await rig.post("/v1/completions", {"prompt": "hello", "max_tokens": 2}, headers=headers)
        assert status == 200, reply
        assert [one.get("traceparent") for one in server.headers] == [passed]
        assert (await life_of(rig, "mine"))["rollouts"][0]["traceparent"] == passed
    finally:
        await server.stop()
