"""/v1/sessions: what a trainer asks of sessions, their keys, and the clients of agents that use these."""

import asyncio
from typing import Any

import anthropic
import msgspec
import numpy as np
import openai
import pytest

from gateway.agents import sessions as registry
from gateway.http.guard.keys import SessionKey
from gateway.http.routes import sessions as routes
from tests.rigs.rig import Json, Rig, StartRig
from tests.rigs.sessions import answered, frozen, record, said, turn

HELLO: Any = [{"role": "user", "content": "hello"}]
KEYS: Json = {"trusted_networks": [], "admin_keys": ["admin"], "inference_keys": ["one", "two"]}


def bearer(key: str) -> Json:
    return {"headers": {"Authorization": f"Bearer {key}"}}


async def test_a_session_is_begun_with_a_key_and_joined(rig: Rig) -> None:
    status, begun = await rig.post("/v1/sessions", {"id": "one", "metadata": {"task": 7}})
    assert (status, begun["id"], begun["url"], begun["state"]) == (201, "one", "/sessions/one/v1", "open")
    status, joined = await rig.post("/v1/sessions", {"id": "one"})
    assert (status, joined) == (200, begun | {"new": False})
    head, calls = await record(rig, "one")
    assert (head["metadata"], calls) == ({"task": 7}, [])
    status, other = await rig.post("/v1/sessions", {})
    assert (status, other["id"] != "one") == (201, True)


@pytest.mark.parametrize("id", ["", "a/b", "a" * 257, "ä"])
async def test_an_id_that_no_path_has_is_refused(rig: Rig, id: str) -> None:
    status, error = await rig.post("/v1/sessions", {"id": id})
    assert (status, error["error"]["param"]) == (400, "id")


async def test_official_clients_work_on_a_sessions_url_and_with_its_key_alone(rig: Rig) -> None:
    _, begun = await rig.post("/v1/sessions", {"id": "one"})
    async with anthropic.AsyncAnthropic(base_url=f"{rig.url}/sessions/one", api_key="k", max_retries=0) as messages:
        await messages.messages.create(model="sim", max_tokens=6, messages=HELLO)
    async with openai.AsyncOpenAI(base_url=rig.url + begun["url"], api_key="k", max_retries=0) as by_url:
        assert [card.id async for card in by_url.models.list()] == ["sim"]
        await by_url.responses.create(model="sim", input=HELLO, max_output_tokens=6)
        await by_url.chat.completions.create(model="sim", messages=HELLO, max_tokens=6)
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=begun["key"], max_retries=0) as by_key:
        assert [card.id async for card in by_key.models.list()] == ["sim"]
        answer = await by_key.chat.completions.create(model="sim", messages=HELLO, max_tokens=6)
        stream = await by_key.chat.completions.create(model="sim", messages=HELLO, max_tokens=6, stream=True)
        assert [chunk async for chunk in stream]
    _, calls = await record(rig, "one")
    assert [call["dialect"] for call in calls] == ["messages", "responses", "chat", "chat", "chat"]
    assert answer.choices[0].message.content


async def test_chat_without_a_session_is_not_recorded(rig: Rig) -> None:
    body: Json = {"model": "sim", "messages": HELLO, "max_tokens": 6, "prompt_cache_key": "a"}
    await rig.post("/v1/chat/completions", body, headers={"X-Session-Id": "a"})
    assert (await rig.get("/v1/sessions"))[1] == {"sessions": []}


@pytest.mark.parametrize(
    ("headers", "fields", "named"),
    [
        ({"X-Claude-Code-Session-Id": "s"}, {}, ("s", None, None)),
        ({"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a"}, {}, ("s", "a", None)),
        ({"session-id": "s", "thread-id": "s", "x-codex-window-id": "s:0"}, {}, ("s", None, "s:0")),
        ({"session-id": "s", "thread-id": "t"}, {"prompt_cache_key": "t"}, ("s", "t", None)),
        ({"X-Session-Id": "s"}, {}, ("s", None, None)),
        ({}, {"metadata": {"user_id": '{"session_id": "s"}'}}, ("s", None, None)),
        ({}, {"prompt_cache_key": "s"}, ("s", None, None)),
    ],
)
async def test_a_harness_names_its_session(rig: Rig, headers: Json, fields: Json, named: tuple[Any, ...]) -> None:
    status, reply = await rig.post("/v1/messages", turn("hello") | fields, headers=headers)
    assert status == 200, reply
    _, [call] = await record(rig, named[0])
    assert (call["agent"], call["window"]) == named[1:]


async def test_names_of_a_harness_that_no_path_has_are_hashed(rig: Rig) -> None:
    headers = {"X-Claude-Code-Session-Id": "a/b", "X-Claude-Code-Agent-Id": b"\xff".decode("latin-1")}
    assert (await rig.post("/v1/messages", turn("hello"), headers=headers))[0] == 200
    [session] = (await rig.get("/v1/sessions"))[1]["sessions"]
    _, [call] = await record(rig, session["id"])
    assert (len(session["id"]), len(call["agent"])) == (32, 32)


@pytest.mark.parametrize("fields", [{}, {"metadata": {"user_id": "somebody"}}, {"user": "u"}])
async def test_a_turn_that_names_no_session_is_not_recorded(rig: Rig, fields: Json) -> None:
    assert (await rig.post("/v1/messages", turn("hello") | fields))[0] == 200
    assert (await rig.get("/v1/sessions"))[1] == {"sessions": []}


async def test_sessions_are_listed_by_their_state(rig: Rig) -> None:
    await said(rig, "one", "hello")
    await said(rig, "two", "hello")
    await frozen(rig, "two", reward=1)
    _, listed = await rig.get("/v1/sessions")
    assert [(one["id"], one["state"], one["calls"]) for one in listed["sessions"]] == [
        ("one", "open", 1),
        ("two", "frozen", 1),
    ]
    _, listed = await rig.get("/v1/sessions?state=frozen")
    assert [(one["id"], one["reward"]) for one in listed["sessions"]] == [("two", 1.0)]
    assert (await rig.get("/v1/sessions?state=done"))[0] == 400


async def test_the_last_reward_of_a_session_holds_and_each_call_has_its_own(rig: Rig) -> None:
    await said(rig, "one", "hello")
    await said(rig, "one", "hello again")
    for body in ({"reward": 0.25}, {"reward": 0.5, "info": {"passed": 3}}, {"reward": 2, "call": 1}):
        status, _ = await rig.post("/v1/sessions/one/reward", body)
        assert status == 200
    head, calls = await record(rig, "one")
    assert (head["reward"], head["info"], head["rewards"]) == (0.5, {"passed": 3}, {"1": 2.0})
    assert [call["reward"] for call in calls] == [None, 2.0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("reward", {"reward": "a"}, "reward"),
        ("reward", {"reward": 1, "call": 1}, "call"),
        ("reward", {"reward": 1, "info": {"a": "b" * 70_000}}, "info"),
        ("reward", {"reward": 1, "call": 0, "info": {"passed": 3}}, "info"),
        ("freeze", {"wait_s": 601}, "wait_s"),
    ],
)
async def test_a_bad_field_is_named(rig: Rig, path: str, body: Json, param: str) -> None:
    await said(rig, "one", "hello")
    status, error = await rig.post(f"/v1/sessions/one/{path}", body)
    assert (status, error["error"]["param"]) == (400, param)


async def test_a_session_is_read_as_msgpack_with_arrays_as_bytes(rig: Rig) -> None:
    await said(rig, "one", "hello")
    _, [call] = await record(rig, "one")
    async with rig.client.get(f"{rig.url}/v1/sessions/one") as response:
        assert response.content_type == "application/msgpack"
        content = await response.read()
    records = []
    while content:
        size = msgspec.msgpack.decode(content[:5], type=int)
        records.append(msgspec.msgpack.decode(content[5 : 5 + size]))
        content = content[5 + size :]
    assert [one["type"] for one in records] == ["session", "call", "end"]
    for field, dtype in (("prompt_token_ids", "<i4"), ("token_ids", "<i4"), ("logprobs", "<f4")):
        assert np.frombuffer(records[1][field], dtype).tolist() == call[field]


async def test_calls_of_a_session_are_packed_one_to_a_turn_of_the_loop(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said_first in ("a screenshot", "another"):
        await said(rig, "one", said_first)
    turns, packed_at, framed = 0, list[int](), routes._framed

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def noted(record: Json) -> bytes:
        packed_at.append(turns)
        return framed(record)

    monkeypatch.setattr(routes, "_framed", noted)
    ticking = asyncio.create_task(tick())
    await record(rig, "one")
    ticking.cancel()
    assert len(set(packed_at)) == len(packed_at) == 4, "the head, two calls and the end"


async def test_only_a_frozen_session_is_acked_and_once_acked_it_takes_no_call(rig: Rig) -> None:
    await said(rig, "one", "hello")
    assert (await rig.post("/v1/sessions/one/ack"))[0] == 409
    await frozen(rig, "one")
    for _ in range(2):  # the reply to the first may have been lost
        assert (await rig.post("/v1/sessions/one/ack"))[0] == 200
    assert (await answered(rig, "one", turn("hello")))[0] == 409
    assert (await rig.post("/v1/sessions", {"id": "one"}))[0] == 201
    await said(rig, "one", "hello")


async def test_official_clients_do_not_ask_a_frozen_session_again(rig: Rig) -> None:
    await said(rig, "one", "hello")
    await frozen(rig, "one")
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/sessions/one/v1", api_key="k") as client:
        with pytest.raises(openai.ConflictError, match="session is frozen"):
            await client.responses.create(model="sim", input=HELLO)
    async with anthropic.AsyncAnthropic(base_url=f"{rig.url}/sessions/one", api_key="k") as messages:
        with pytest.raises(anthropic.ConflictError, match="session is frozen"):
            await messages.messages.create(model="sim", max_tokens=6, messages=HELLO)
    page = await (await rig.client.get(f"{rig.url}/metrics")).text()
    for route in ("responses", "messages"):
        assert f'requests_total{{route="/sessions/{{session}}/v1/{route}",status="409"}} 1.0' in page


async def test_a_deleted_session_is_gone(rig: Rig) -> None:
    await said(rig, "one", "hello")
    async with rig.client.delete(f"{rig.url}/v1/sessions/one") as response:
        assert response.status == 200
    assert (await rig.get("/v1/sessions/one"))[0] == 404


async def test_a_sessions_key_opens_its_turns_alone(start_rig: StartRig) -> None:
    rig = await start_rig(gateway=KEYS)
    _, begun = await rig.post("/v1/sessions", {"id": "mine"}, **bearer("one"))
    key = bearer(begun["key"])
    for path in ("/v1/messages", "/sessions/mine/v1/messages"):
        assert (await rig.post(path, turn("hello"), **key))[0] == 200
    assert (await rig.get("/sessions/mine/v1/models", **key))[0] == 200
    status, error = await rig.post("/sessions/other/v1/messages", turn("hello"), **key)
    assert (status, error["type"], error["error"]["type"]) == (403, "error", "permission_error")
    for path in ("/v1/sessions/mine/reward", "/v1/sessions/mine/ack", "/v1/sessions/mine/freeze", "/v1/sessions"):
        assert (await rig.post(path, {}, **key))[0] == 403
    for path in ("/v1/completions", "/inference/v1/generate", "/pause"):
        assert (await rig.post(path, {}, **key))[0] == 401
    async with rig.client.get(f"{rig.url}/v1/sessions/mine", **key) as response:
        assert response.status == 403
    forged = SessionKey("other", SessionKey.read(begun["key"]).signature)  # type: ignore[union-attr]
    for wrong in (str(forged), "rgs-", "rgs-bWluZQ-0", "rgs-\u00e4-1", str(SessionKey.signed("mine", ""))):
        status, error = await rig.post(
            "/v1/messages", turn("hello"), headers={"x-api-key": wrong.encode().decode("latin-1")}
        )
        assert (status, error["error"]["type"]) == (401, "authentication_error")
    _, calls = await record(rig, "mine", "one")
    assert len(calls) == 2


async def test_sessions_belong_to_the_key_that_began_them(start_rig: StartRig) -> None:
    rig = await start_rig(gateway=KEYS)
    await rig.post("/sessions/s/v1/messages", turn("hello"), **bearer("one"))
    assert (await rig.get("/v1/sessions/s", **bearer("two")))[0] == 404
    assert (await rig.get("/v1/sessions", **bearer("two")))[1] == {"sessions": []}
    assert len((await record(rig, "s", "one"))[1]) == 1


async def test_a_key_is_its_clients_also_from_a_trusted_network(start_rig: StartRig) -> None:
    """A trainer beside the gateway begins a session for an agent in another network."""
    rig = await start_rig(gateway=KEYS | {"trusted_networks": ["127.0.0.0/8"]})
    _, begun = await rig.post("/v1/sessions", {"id": "s"}, **bearer("one"))
    assert SessionKey.read(begun["key"]) == SessionKey.signed("s", "one")
    assert (await rig.post("/v1/messages", turn("hello"), **bearer(begun["key"])))[0] == 200
    assert len((await record(rig, "s", "one"))[1]) == 1


async def test_over_its_bytes_the_least_recently_used_sessions_of_a_key_are_forgotten(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_BOUNDS_S", 0.02)
    rig = await start_rig(gateway={"sessions": {"max_bytes": 8000}})
    for name in ("a", "b", "a", "c"):
        await said(rig, name, "hello")
    async with asyncio.timeout(20):
        while len(listed := (await rig.get("/v1/sessions"))[1]["sessions"]) > 2:
            await asyncio.sleep(0.02)
    assert [one["id"] for one in listed] == ["a", "c"]


async def test_the_metadata_of_sessions_without_a_call_counts_in_their_bytes(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_BOUNDS_S", 0.02)
    rig = await start_rig(gateway={"sessions": {"max_bytes": 8000}})
    for name in ("a", "b"):
        await rig.post("/v1/sessions", {"id": name, "metadata": {"task": "t" * 5000}})
    async with asyncio.timeout(20):
        while len(listed := (await rig.get("/v1/sessions"))[1]["sessions"]) > 1:
            await asyncio.sleep(0.02)
    assert [one["id"] for one in listed] == ["b"]


async def test_calls_are_refused_while_open_ones_fill_all_bytes(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_BOUNDS_S", 0.02)
    rig = await start_rig(gateway={"sessions": {"max_bytes": 1000}})
    asking = asyncio.create_task(answered(rig, "one", turn("three", max_tokens=80)))
    await rig.begun(tokens=9)
    async with asyncio.timeout(20):
        while (found := await answered(rig, "two", turn("hello")))[0] == 200:
            await asyncio.sleep(0.02)
    assert (found[0], found[1]["error"]["type"]) == (429, "rate_limit_error")
    assert "gateway.sessions.max_bytes" in found[1]["error"]["message"]
    rig.hurry()
    assert (await asking)[0] == 200


async def test_tokens_are_counted_as_sampled_captured_delivered_and_masked(rig: Rig) -> None:
    await said(rig, "one", "hello")
    asking = asyncio.create_task(answered(rig, "one", turn("three", max_tokens=80)))
    await rig.begun(tokens=9)
    await frozen(rig, "one")
    await asking
    await record(rig, "one")
    await rig.post("/v1/sessions/one/ack")
    page = await (await rig.client.get(f"{rig.url}/metrics")).text()
    for step, number in (("sampled", 15), ("captured", 15)):
        assert f'rollout_gateway_session_tokens_total{{step="{step}"}} {number}.0' in page
    assert 'rollout_gateway_masked_session_tokens_total{reason="frozen"} 9.0' in page
