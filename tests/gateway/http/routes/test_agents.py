"""/v1/messages and /v1/responses of Anthropic's and OpenAI's own clients, unchanged but for their base_url."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from sim.dialect import chat_text
from sim.model import tokenize
from tests.rigs.rig import Json, Rig, StartRig
from tests.running.client_records import runs_client

if TYPE_CHECKING:
    import anthropic
    import openai

pytestmark = runs_client(
    "Anthropic Python", "anthropic", ran="messages, count_tokens, streams, errors", against="2 simulated engines"
)

# The simulated engine answers this with 81 tokens at temperature 0.
HELLO: Any = [{"role": "user", "content": "three"}]
ASKED: Json = {"model": "sim", "max_tokens": 8, "temperature": 0.0, "messages": HELLO}
LONG = 60


@pytest.fixture
async def claude(rig: Rig) -> "AsyncIterator[anthropic.AsyncAnthropic]":
    sdk = pytest.importorskip("anthropic")
    async with sdk.AsyncAnthropic(base_url=rig.url, api_key="none", max_retries=0, timeout=20.0) as client:
        yield client


@pytest.fixture
async def client(rig: Rig) -> "AsyncIterator[openai.AsyncOpenAI]":
    sdk = pytest.importorskip("openai")
    async with sdk.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, timeout=20.0) as client:
        yield client


async def events(rig: Rig, path: str, body: Json, **headers: str) -> str:
    async with rig.client.post(rig.url + path, json=body | {"stream": True}, headers=headers) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
        return await response.text()


async def test_a_message_is_the_text_of_the_tokens_that_engines_sampled(claude: "anthropic.AsyncAnthropic") -> None:
    asked: Any = {"extra_body": {"temperature": 0.0}}
    message = await claude.messages.create(model="sim", max_tokens=8, messages=HELLO, **asked)
    assert (message.role, message.model, message.stop_reason) == ("assistant", "sim", "max_tokens")
    assert message.usage.output_tokens == 8
    assert message.usage.input_tokens == len(tokenize(chat_text(HELLO)))
    assert [block.type for block in message.content] == ["text"]


async def test_a_streamed_message_is_the_whole_one(claude: "anthropic.AsyncAnthropic") -> None:
    asked: Any = {"model": "sim", "max_tokens": 8, "messages": HELLO, "extra_body": {"temperature": 0.0}}
    whole = await claude.messages.create(**asked)
    async with claude.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    texts = [[block.text for block in message.content if block.type == "text"] for message in (streamed, whole)]
    assert texts[0] == texts[1] != []
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


async def test_tokens_are_counted_without_a_limit(claude: "anthropic.AsyncAnthropic") -> None:
    counted = await claude.messages.count_tokens(model="sim", messages=HELLO)
    assert counted.input_tokens == len(tokenize(chat_text(HELLO)))


async def test_a_streamed_response_is_the_whole_one(client: "openai.AsyncOpenAI") -> None:
    asked: Any = {"model": "sim", "input": "three", "max_output_tokens": 8, "temperature": 0.0}
    whole = await client.responses.create(**asked)
    assert (whole.status, whole.output_text != "") == ("incomplete", True)
    assert whole.usage is not None
    assert whole.usage.output_tokens == 8
    shown = [event async for event in await client.responses.create(**asked, stream=True)]
    assert shown[0].type == "response.created"
    assert shown[-1].type == "response.incomplete"
    assert shown[-1].response.output_text == whole.output_text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": HELLO, "max_tokens": LONG}),
        ("/v1/responses", {"input": "three", "max_output_tokens": LONG}),
    ],
)
async def test_an_answer_goes_on_after_its_replica_has_died(
    start_rig: StartRig, path: str, body: Json, stream: bool
) -> None:
    rig = await start_rig(2, sim={"decode_step_s": 0.01})
    asked = body | {"model": "sim", "temperature": 0.0}
    running = asyncio.create_task(events(rig, path, asked) if stream else rig.post(path, asked))
    await rig.begun(1, tokens=9)
    before = sum(replica.generated_tokens for replica in rig.replicas)
    loaded = next(replica.replica_id for replica in rig.fleet.replicas if replica.load_samples)
    await next(replica for replica in rig.replicas if replica.info.replica_id == loaded).kill()
    rig.hurry()
    told = await running
    made = sum(replica.generated_tokens for replica in rig.replicas)
    assert before < LONG
    assert made < 2 * LONG  # its tokens were not made again
    assert f'"output_tokens":{LONG}' in str(told) or f"'output_tokens': {LONG}" in str(told)


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"model": "gpt-9"}, 404, "not_found_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "a" * 100_000}]}, 400, "invalid_request_error"),
    ],
    ids=["model", "limit", "role", "length"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_error_before_the_answer_has_its_status_and_anthropics_form(
    rig: Rig, change: Json, status: int, kind: str, stream: bool
) -> None:
    got, reply = await rig.post("/v1/messages", ASKED | change | {"stream": stream})
    assert (got, reply["type"], reply["error"]["type"]) == (status, "error", kind)


async def test_an_error_of_a_response_has_openais_form(rig: Rig) -> None:
    status, reply = await rig.post("/v1/responses", {"model": "gpt-9", "input": "three"})
    assert (status, reply["error"]["param"]) == (404, "model")


async def test_anthropics_header_has_the_key(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway={"inference_keys": ["sk-mine-0123456789"], "trusted_networks": []})
    status, reply = await rig.post("/v1/messages", ASKED, headers={"x-api-key": "sk-other"})
    assert (status, reply["error"]["type"]) == (401, "authentication_error")
    status, _ = await rig.post("/v1/messages", ASKED, headers={"x-api-key": "sk-mine-0123456789"})
    assert status == 200


async def test_a_client_that_leaves_a_stream_ends_its_answer(start_rig: StartRig) -> None:
    rig = await start_rig(1, sim={"decode_step_s": 0.05})
    asked = ASKED | {"max_tokens": 81, "stream": True}
    async with rig.client.post(rig.url + "/v1/messages", json=asked) as response:
        assert (await response.content.readline()).startswith(b"event: message_start")
        await rig.begun()
        response.close()
    async with asyncio.timeout(20):
        while any(replica.load_samples for replica in rig.fleet.replicas):
            await asyncio.sleep(0.01)
    assert rig.replicas[0].generated_tokens < 81


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"X-Claude-Code-Session-Id": "a"}, {}),
        ({"thread-id": "a", "session-id": "b"}, {}),
        ({}, {"metadata": {"user_id": '{"session_id": "a"}'}}),
    ],
    ids=["claude code", "codex", "metadata"],
)
async def test_turns_of_a_harness_are_placed_by_its_session(rig: Rig, headers: Json, fields: Json) -> None:
    for _ in range(4):
        status, _ = await rig.post("/v1/messages", ASKED | fields, headers=headers)
        assert status == 200
    assert sorted(replica.generated_tokens for replica in rig.replicas) == [0, 32]
