"""The record of an agent's session: what was sampled, after which prompt, and how it ended."""

import asyncio
from pathlib import Path

import pytest

from tests.rigs.rig import Rig, StartRig
from tests.rigs.sessions import frozen, record, said, whole


async def test_a_session_is_recorded_read_and_acked(rig: Rig) -> None:
    first = await said(rig, "one", "hello")
    await said(rig, "one", "hello", first, "more")
    head = await frozen(rig, "one", reward=0.5)
    assert (head["state"], head["calls"], head["open_calls"], head["reward"]) == ("frozen", 2, 0, 0.5)
    assert head["tokens"] == {"sampled": 12, "trainable": 12, "masked": {}}
    _, calls = await record(rig, "one")
    assert [call["parent"] for call in calls] == [None, 0]
    assert [len(call["token_ids"]) for call in calls] == [6, 6]
    assert all(len(call["logprobs"]) == 6 and call["state"] == "ended" and call["mask"] is None for call in calls)
    assert [call["weight_versions"] for call in calls] == [[{"version": 0, "start": 0, "end": 6}]] * 2
    assert len(whole(calls, 1)) == calls[1]["prompt_tokens"] + 6
    status, reply = await rig.post("/v1/sessions/one/ack")
    assert (status, reply) == (200, {"id": "one", "state": "acked"})
    assert (await rig.get("/v1/sessions/one"))[0] == 404


async def test_a_session_goes_on_after_a_restart_of_the_gateway(start_rig: StartRig, tmp_path: Path) -> None:
    rig = await start_rig(gateway={"ledger": str(tmp_path / "ledger")})
    first = await said(rig, "one", "hello")
    asking = asyncio.create_task(said(rig, "one", "hello", first, "more"))
    await rig.begun(tokens=2)
    before = await record(rig, "one")
    await rig.stop_gateway()
    rig.hurry()
    again = await start_rig(replicas=rig.replicas, gateway={"ledger": str(tmp_path / "ledger")})
    head, calls = await record(again, "one")
    assert head["durable"]
    assert calls[0] == before[1][0]
    assert (calls[1]["state"], calls[1]["mask"]) == ("cut", "gateway_ended")
    await said(again, "one", "hello", first, "more")
    _, calls = await record(again, "one")
    assert [(call["parent"], call["retry_of"]) for call in calls] == [(None, None), (0, None), (0, 1)]
    with pytest.raises(AssertionError, match="the gateway ends"):
        await asking
