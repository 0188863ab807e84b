"""POST /v1/rollouts over simulated engines: delivery, cursors, deadlines, joins, cancellation, keys."""

import asyncio
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from gateway.dialects.submissions import registry
from tests.rigs.calls import until
from tests.rigs.rig import Json, Rig, StartRig
from tests.rigs.submissions import (
    GROUP,
    ack,
    body,
    detached,
    lines,
    of_type,
    outcomes,
    read,
    samples,
    submitted,
)

SLOW = {"decode_step_s": 0.01}


async def idle(rig: Rig) -> None:
    """Return when no engine has work."""
    await until(lambda: not any(replica.load_samples for replica in rig.fleet.replicas))


async def ended(rig: Rig, name: str) -> None:
    await until(lambda: rig.post(f"/v1/rollouts/{name}/ack", {"cursor": 0}), lambda got: got[1]["ended"])


async def test_each_sample_comes_once_and_groups_end_after_theirs(rig: Rig) -> None:
    events = await submitted(rig, [GROUP | {"n": 3}, {"prompt": "abc", "n": 2}])
    head, *rest, end = events
    assert (head["type"], head["groups"], end["type"]) == ("submission", 2, "end")
    assert sorted(samples(rest)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert outcomes(rest) == {0: "delivered", 1: "delivered"}
    places = {event["group"]: place for place, event in enumerate(rest) if event["type"] == "group"}
    assert all(place <= places[event["group"]] for place, event in enumerate(rest))
    cursors = [event["cursor"] for event in events]
    assert cursors == sorted(set(cursors))


@pytest.mark.parametrize("restarts", [{}, {"stop": ["never"]}], ids=["goes on", "restarts"])
async def test_need_of_n_ends_the_others_on_their_engines(start_rig: StartRig, restarts: Json) -> None:
    rig = await start_rig(1, sim=SLOW)
    sampling = {"max_tokens": 100, "ignore_eos": False} | restarts
    events = await submitted(rig, [GROUP | {"n": 8, "need": 2, "sampling": sampling}])
    assert outcomes(events) == {0: "delivered"}
    assert 2 <= len(samples(events)) < 8
    await idle(rig)


@pytest.mark.parametrize(
    ("on_deadline", "outcome", "delivered"),
    [("cancel", "expired", []), ("return_partial", "partial", [6, 6])],
)
async def test_a_deadline_ends_open_samples_as_asked(
    rig: Rig, on_deadline: str, outcome: str, delivered: list[int]
) -> None:
    group = GROUP | {"n": 2, "deadline_s": 3.0, "on_deadline": on_deadline}
    asking = asyncio.create_task(submitted(rig, [group]))
    await rig.begun(samples=2, tokens=6)
    events = await asking
    assert outcomes(events) == {0: outcome}
    found = of_type(events, "sample")
    assert [len(sample["token_ids"]) for sample in found] == delivered
    assert all(sample["finish_reason"] == "deadline" for sample in found)
    assert all(sample["weight_versions"] == [{"version": 0, "start": 0, "end": 6}] for sample in found)
    await idle(rig)


async def test_reading_goes_on_after_any_cursor(rig: Rig) -> None:
    events = (await submitted(rig, [GROUP | {"n": 2}, GROUP], id="one"))[1:]
    for place, event in enumerate(events):
        assert (await read(rig, "one", event["cursor"]))[1:] == events[place + 1 :]
    assert (await read(rig, "one"))[1:] == events


async def test_what_was_acked_is_freed_and_the_rest_is_read_from_there(rig: Rig) -> None:
    events = await submitted(rig, [GROUP | {"n": 2}], id="one")
    cursor = events[1]["cursor"]
    assert (await ack(rig, "one", cursor))["cursor"] == cursor
    assert (await ack(rig, "one", 0))["cursor"] == cursor
    assert (await read(rig, "one"))[1:] == events[2:]
    assert (await submitted(rig, [GROUP | {"n": 2}], id="one"))[1:] == events[2:]
    status, error = await rig.get("/v1/rollouts/one?cursor=0")
    assert (status, error["error"]["param"]) == (400, "cursor")


async def test_a_client_that_leaves_finds_all_that_was_made(rig: Rig) -> None:
    request = rig.client.post(rig.url + "/v1/rollouts", json=body([GROUP | {"n": 2}], id="one"))
    async with request as response:
        await response.content.readline()
        await rig.begun(samples=2)
    rig.hurry()
    assert sorted(samples(await read(rig, "one"))) == [(0, 0), (0, 1)]


async def test_a_cancelled_submission_ends_on_the_engines_and_keeps_what_ended(rig: Rig) -> None:
    await detached(rig, "one", [GROUP | {"sampling": {"max_tokens": 2}}, GROUP])
    await rig.begun(samples=1, tokens=6)
    async with rig.client.delete(rig.url + "/v1/rollouts/one") as response:
        assert response.status == 200
    events = await read(rig, "one")
    assert samples(events) == [(0, 0)]
    assert outcomes(events) == {0: "delivered", 1: "cancelled"}
    await idle(rig)


async def test_a_submission_belongs_to_its_key(start_rig: StartRig) -> None:
    keys = {"inference_keys": ["mine", "yours"], "admin_keys": ["owner"], "trusted_networks": []}
    rig = await start_rig(1, gateway=keys)
    mine, yours = ({"Authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    assert (await rig.post("/v1/rollouts", body(id="one")))[0] == 401
    assert (await rig.post("/v1/rollouts", body(id="one", stream=False), headers=mine))[0] == 202
    status, error = await rig.get("/v1/rollouts/one", headers=yours)
    assert (status, error["error"]["type"]) == (404, "NotFoundError")
    assert (await rig.post("/v1/rollouts", body([GROUP | {"n": 2}], id="one", stream=False), headers=yours))[0] == 202


async def test_another_key_neither_sees_nor_ends_the_rollouts_of_an_equal_id(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"inference_keys": ["mine", "yours"], "admin_keys": ["owner"], "trusted_networks": []}
    rig = await start_rig(1, gateway=keys)
    mine, yours = ({"Authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    sending = asyncio.create_task(rig.post("/v1/rollouts", body([GROUP] * 40, id="one-1", stream=False), headers=mine))
    await rig.begun(samples=8)
    await sending
    for name in ("one-1", "one"):
        assert (await rig.post("/v1/rollouts", body(id=name, stream=False), headers=yours))[0] == 202
    await until(lambda: rig.get("/status", headers=mine), lambda got: got[1]["queue_length"] >= 10)
    [replica] = rig.fleet.replicas
    able = replace(replica.info, capabilities=replica.info.capabilities | {"/inference/v1/abort_requests"})
    monkeypatch.setattr(replica, "info", able)
    ids = [f"one-1-{group}" for group in range(40)]
    status, _ = await rig.post("/inference/v1/abort_requests", {"request_ids": ids}, headers=yours)
    assert status == 200
    rig.hurry()
    async with rig.client.get(f"{rig.url}/v1/rollouts/one-1", headers=mine) as response:
        assert outcomes(lines(await response.read())) == dict.fromkeys(range(40), "delivered")


def frames(content: bytes) -> Iterator[Json]:
    while content:
        mark, length = struct.unpack_from(">BI", content)
        assert mark == 0xCE
        yield msgspec.msgpack.decode(content[5 : 5 + length])
        content = content[5 + length :]


async def test_msgpack_has_the_same_events_with_arrays_as_bytes(rig: Rig) -> None:
    lined = await submitted(rig, [{"prompt": "abc"}], id="one")
    async with rig.client.get(rig.url + "/v1/rollouts/one", headers={"Accept": "application/msgpack"}) as response:
        packed = list(frames(await response.read()))
    for event in packed:
        for name, dtype in (("token_ids", "<i4"), ("prompt_token_ids", "<i4"), ("logprobs", "<f4")):
            if name in event:
                event[name] = pytest.approx(np.frombuffer(event[name], dtype).tolist())
    assert lined[1:] == packed[1:]


async def test_a_msgpack_body_may_have_prompts_as_bytes(rig: Rig) -> None:
    first = await submitted(rig, id="one")
    asked = msgspec.msgpack.encode(body([{"prompt": np.asarray([5, 6, 7], "<i4").tobytes()}], id="one"))
    headers = {"Content-Type": "application/msgpack"}
    async with rig.client.post(rig.url + "/v1/rollouts", data=asked, headers=headers) as response:
        assert lines(await response.read())[1:] == first[1:]


BAD: list[tuple[Any, str]] = [
    ({"groups": None}, "groups"),
    ({"groups": ["a"]}, "groups[0]"),
    ({"groups": [{}]}, "groups[0].prompt"),
    ({"groups": [{"prompt": []}]}, "groups[0].prompt"),
    ({"groups": [{"prompt": [1.5]}]}, "groups[0].prompt"),
    ({"groups": [{"prompt": [1] * 128}]}, "groups[0].prompt"),
    ({"groups": [{"promt": "a"}]}, "groups[0].promt"),
    ({"groups": [GROUP, GROUP | {"n": 0}]}, "groups[1].n"),
    ({"groups": [GROUP | {"n": True}]}, "groups[0].n"),
    ({"groups": [GROUP | {"n": 2000}]}, "groups[0].n"),
    ({"groups": [GROUP | {"n": 2, "need": 3}]}, "groups[0].need"),
    ({"groups": [GROUP | {"deadline_s": 0}]}, "groups[0].deadline_s"),
    ({"groups": [GROUP | {"deadline_s": 1e99}]}, "groups[0].deadline_s"),
    ({"groups": [GROUP | {"on_deadline": "stop"}]}, "groups[0].on_deadline"),
    ({"groups": [GROUP | {"sampling": [1]}]}, "groups[0].sampling"),
    ({"groups": [GROUP | {"sampling": {"stream": True}}]}, "groups[0].sampling.stream"),
    ({"groups": [GROUP | {"sampling": {"logprobs": 5}}]}, "groups[0].sampling.logprobs"),
    ({"groups": [GROUP | {"sampling": {"max_tokens": 0}}]}, "groups[0].max_tokens"),
    ({"groups": [GROUP | {"sampling": {"temperature": "warm"}}]}, "groups[0].temperature"),
    ({"groups": [GROUP | {"min_version": -1}]}, "groups[0].min_version"),
    ({"groups": [GROUP | {"max_staleness": "1"}]}, "groups[0].max_staleness"),
    ({"groups": [GROUP | {"priority": 10**7}]}, "groups[0].priority"),
    ({"groups": [GROUP | {"session_id": 7}]}, "groups[0].session_id"),
    ({"groups": [GROUP | {"model": 7}]}, "groups[0].model"),
    ({"groups": [GROUP | {"model": "unknown"}]}, "groups[0].model"),
    ({"groups": [GROUP], "id": ""}, "id"),
    ({"groups": [GROUP], "id": "."}, "id"),
    ({"groups": [GROUP], "id": "a" * 257}, "id"),
    ({"groups": [GROUP], "id": 7}, "id"),
    ({"groups": [GROUP], "stream": "no"}, "stream"),
    ({"groups": [GROUP], "nn": 2}, "nn"),
]


@pytest.mark.parametrize(("sent", "param"), BAD)
async def test_a_bad_field_is_named_and_nothing_begins(rig: Rig, sent: Json, param: str) -> None:
    status, error = await rig.post("/v1/rollouts", sent)
    assert status in (400, 404), error
    assert error["error"]["param"] == param, error
    assert (await rig.get("/status"))[1]["ledger"]["submissions"] == 0


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x81\xa1a", b"\x93\x01\x02\x03", b"\x91" * 5000])
async def test_a_body_that_is_no_msgpack_object_is_refused(rig: Rig, content: bytes) -> None:
    headers = {"Content-Type": "application/msgpack"}
    async with rig.client.post(rig.url + "/v1/rollouts", data=content, headers=headers) as response:
        assert response.status == 400


async def test_one_group_fails_alone(rig: Rig) -> None:
    for replica in rig.replicas:
        replica.inject(deadly_prompt="[66, 6, 6]", status=None)
    await rig.replicas[0].kill()
    events = await submitted(rig, [{"prompt": [66, 6, 6]}, GROUP])
    assert outcomes(events)[1] == "delivered"


@pytest.mark.parametrize(("status", "code"), [(500, 502), (422, 422)])
async def test_engines_that_fail_or_refuse_end_a_group_with_their_error(rig: Rig, status: int, code: int) -> None:
    for replica in rig.replicas:
        replica.inject(status=status)
    [group] = of_type(await submitted(rig), "group")
    assert (group["outcome"], group["error"]["code"]) == ("failed", code)
    assert bool(group["error"].get("replica_id")) == (status == 500)


async def test_a_submission_that_nobody_reads_is_cancelled(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_ABANDONED_AFTER_S", 0.5)
    rig = await start_rig(1)
    await detached(rig, "one")
    await rig.begun(samples=1)
    await ended(rig, "one")
    [group] = of_type(await read(rig, "one"), "group")
    assert (group["outcome"], "nobody has read its events for 0.5 s" in group["error"]["message"]) == (
        "cancelled",
        True,
    )


async def test_an_id_with_other_groups_is_refused(rig: Rig) -> None:
    await submitted(rig, id="one")
    status, error = await rig.post("/v1/rollouts", body([GROUP | {"n": 2}], id="one"))
    assert (status, error["error"]["type"], error["error"]["param"]) == (409, "IdTaken", "id")
