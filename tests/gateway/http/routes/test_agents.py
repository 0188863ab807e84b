"""Turns of agents through a gateway with two simulated engines, asked for by the official clients."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from gateway.http.routes import agents
from tests.rigs.calls import until
from tests.rigs.rig import Rig, StartRig

HELLO: Any = [{"role": "user", "content": "hello"}]
HELLO_ITEMS: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
async def messages(rig: Rig) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=rig.url, api_key="k", max_retries=0, timeout=20.0) as client:
        yield client


@pytest.fixture
async def responses(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="k", max_retries=0, timeout=20.0) as client:
        yield client


async def test_a_tool_is_called_with_its_name_and_arguments(messages: anthropic.AsyncAnthropic) -> None:
    answers = [
        await messages.messages.create(model="sim", max_tokens=6, messages=HELLO, tools=[TOOL]) for _ in range(20)
    ]
    called = [block for answer in answers for block in answer.content if block.type == "tool_use"]
    assert called
    assert {(block.name, *block.input) for block in called} == {("add", "text")}


async def test_tokens_of_a_message_are_counted_as_its_engine_reads_it(messages: anthropic.AsyncAnthropic) -> None:
    message = await messages.messages.create(model="sim", max_tokens=1, messages=HELLO)
    counted = await messages.messages.count_tokens(model="sim", messages=HELLO)
    assert counted.input_tokens == message.usage.input_tokens


async def test_a_key_is_read_from_the_header_of_either_client(start_rig: StartRig) -> None:
    rig = await start_rig(gateway={"trusted_networks": [], "admin_keys": ["a"], "inference_keys": ["secret"]})
    body = {"model": "sim", "max_tokens": 1, "messages": HELLO}
    assert (await rig.post("/v1/messages", body, headers={"x-api-key": "secret"}))[0] == 200
    assert (await rig.post("/v1/messages", body, headers={"Authorization": "Bearer secret"}))[0] == 200
    status, error = await rig.post("/v1/messages", body, headers={"x-api-key": "wrong"})
    assert (status, error["error"]["type"]) == (401, "authentication_error")


async def test_a_stream_that_waits_for_an_engine_is_kept_alive(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_PING_S", 0.05)
    rig = await start_rig(1)
    rig.replicas[0].inject(held="/render")
    body = {"model": "sim", "max_tokens": 6, "messages": HELLO, "stream": True}
    async with aiohttp.ClientSession() as client, client.post(f"{rig.url}/v1/messages", json=body) as reply:
        async with asyncio.timeout(20):
            while b"event: ping" not in await reply.content.readline():
                continue
            rig.replicas[0].inject()
            assert b"message_stop" in await reply.content.read()


async def test_a_stream_that_fails_in_a_way_nobody_foresaw_ends_with_an_error(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise LookupError("a defect")

    monkeypatch.setattr("gateway.dialects.rendering.Rendering.message", broken)
    body = {"model": "sim", "max_tokens": 6, "messages": HELLO, "stream": True}
    async with rig.client.post(f"{rig.url}/sessions/one/v1/messages", json=body) as reply:
        last = (await reply.text()).rstrip().splitlines()[-1]
    assert ("api_error" in last, "its log has the reason" in last) == (True, True)
    assert (await rig.get("/v1/sessions"))[1]["sessions"][0]["tokens"]["masked"] == {"failed": 6}


async def test_a_stream_is_kept_alive_and_its_end_with_its_client_ends_the_turn(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_PING_S", 0.05)
    body = {"model": "sim", "max_tokens": 100, "messages": HELLO, "stream": True}
    for replica in rig.replicas:
        replica.scheduler.stall(after=6)
    async with aiohttp.ClientSession() as client, client.post(f"{rig.url}/v1/messages", json=body) as reply:
        async with asyncio.timeout(20):
            while b"event: ping" not in await reply.content.readline():
                continue
    await until(lambda: not any(replica.scheduler.stalled for replica in rig.replicas))
