"""Anthropic's Messages, in the words of its own client."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("anthropic")

import anthropic

from engines import errors
from engines.errors import InvalidRequest, RolloutGatewayError
from gateway.agents.messages import Messages
from gateway.agents.turn import Turn
from tests.rigs.answering import Answering, answer_of, call

HELLO = {"role": "user", "content": "hello"}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
SHOWN_PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
SHOWN_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA},
}
USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Malmö"}}


def read(**body: Any) -> Turn:
    return Messages().read({"model": "policy", "max_tokens": 9, "messages": [HELLO]} | body)


def messages_of(*messages: Any, **body: Any) -> list[Any]:
    return read(messages=[*messages, HELLO], **body).messages[:-1]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"role": "user", "content": "hi"}, [{"role": "user", "content": "hi"}]),
        (
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            [{"role": "user", "content": "hi"}],
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "see"}, PNG]},
            [{"role": "user", "content": [{"type": "text", "text": "see"}, SHOWN_PNG]}],
        ),
        (
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}]},
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/a.png"}}]}],
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, USE]},
            [
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning": "Hm.",
                    "tool_calls": [call("c1", "weather", '{"city": "Malmö"}')],
                }
            ],
        ),
        (
            {
                "role": "assistant",
                "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}],
            },
            [{"role": "assistant", "content": "a"}],
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "is_error": True}]},
            [{"role": "tool", "tool_call_id": "c1", "content": ""}],
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a"}, PNG]},
                    {"type": "tool_result", "tool_use_id": "c2", "content": "b"},
                    {"type": "text", "text": "go on"},
                ],
            },
            [
                {"role": "tool", "tool_call_id": "c1", "content": "a"},
                {"role": "tool", "tool_call_id": "c2", "content": "b"},
                {"role": "user", "content": [SHOWN_PNG, {"type": "text", "text": "go on"}]},
            ],
        ),
        (
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "tool_reference", "tool_name": "weather"}],
                    }
                ],
            },
            [{"role": "tool", "tool_call_id": "c1", "content": [{"type": "tool_reference", "name": "weather"}]}],
        ),
        ({"role": "system", "content": "now in French"}, [{"role": "system", "content": "now in French"}]),
        (
            {"role": "system", "content": [{"type": "text", "text": "now in "}, {"type": "text", "text": "French"}]},
            [{"role": "system", "content": "now in French"}],
        ),
    ],
)
def test_a_message_is_shown_to_the_template(given: Any, shown: Any) -> None:
    assert messages_of(HELLO, given)[1:] == shown


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]])
def test_the_system_prompt_is_one_text(system: Any) -> None:
    assert messages_of(system=system) == [{"role": "system", "content": "Be brief."}]


def test_the_billing_header_is_left_out_of_the_prompt() -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=01f3;"}
    assert messages_of(system=[header, {"type": "text", "text": "Be brief."}]) == messages_of(system="Be brief.")
    assert messages_of(system=[header]) == []


def test_arguments_that_were_no_object_come_back_as_they_were_sampled() -> None:
    answer = answer_of("tool_calls", tool_calls=[call("c1", "weather", '{"city": "Mal')])
    content = Messages().reply(answer, read())["content"]
    assert content == [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"INVALID_JSON": '{"city": "Mal'}}]
    replayed = messages_of({"role": "assistant", "content": content})
    assert replayed[0]["tool_calls"] == [call("c1", "weather", '{"city": "Mal')]


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({}, {"tool_choice": "auto"}),
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "tool", "name": "weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tool_choice": "auto", "template": {"parallel_tool_calls": False}},
        ),
    ],
)
def test_tools_and_their_choice_are_those_of_a_chat(choice: Any, chosen: Any) -> None:
    turn = read(tools=[TOOL], **choice)
    assert turn.tools == [SHOWN_TOOL]
    assert {name: getattr(turn, name) for name in chosen} == chosen


@pytest.mark.parametrize(
    ("body", "turn"),
    [
        ({"temperature": 0.5, "top_p": 1, "top_k": 3}, {"sampling": {"temperature": 0.5, "top_p": 1, "top_k": 3}}),
        ({"stop_sequences": ["\n\n"]}, {"sampling": {"stop": ["\n\n"]}}),
        ({"thinking": {"type": "enabled", "budget_tokens": 8}}, {"sampling": {"thinking_token_budget": 8}}),
        ({"thinking": {"type": "disabled"}}, {"template": {"reasoning_effort": "none"}}),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
            {"template": {"reasoning_effort": "high"}, "sampling": {}},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {
                "template": {
                    "response_format": {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": SCHEMA}}
                }
            },
        ),
        ({"metadata": {"user_id": "u"}, "context_management": {"edits": []}, "betas": ["b"]}, {"template": {}}),
        ({"chat_template_kwargs": {"a": 1}}, {"template": {"chat_template_kwargs": {"a": 1}}}),
        ({"stream": True, "max_tokens": 3}, {"streams": True, "max_tokens": 3, "model": "policy"}),
    ],
)
def test_fields_go_where_the_engine_reads_them(body: Any, turn: Any) -> None:
    got = read(**body)
    assert {name: getattr(got, name) for name in turn} == turn


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_tokens": None}, "max_tokens = None: give the most tokens of the answer, at least 1"),
        ({"max_tokens": 0}, "max_tokens = 0: "),
        ({"model": None}, "model: a field that is missing"),
        ({"temperature": "hot"}, "temperature: Expected `float"),
        ({"messages": []}, "messages = []: give at least one message"),
        ({"messages": ["hello"]}, "messages[0] = 'hello': this must be an object"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            "messages[0].role = 'bot': there are user, assistant and system",
        ),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content = 7: this must be a list of objects"),
        (
            {"messages": [HELLO, {"role": "user", "content": [{"type": "document"}]}]},
            "messages[1].content[0] = {'type': 'document'}: a user has text, image and tool_result",
        ),
        (
            {"messages": [HELLO, {"role": "assistant", "content": "So"}]},
            "messages[1].role = 'assistant': an answer does",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web"}]},
            "tools[0].type = 'web_search_20250305': the model",
        ),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name = None: a tool needs a name"),
        (
            {"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]},
            "tool_choice.name = 'x': no tool has this name",
        ),
        ({"tool_choice": {"type": "some"}, "tools": [TOOL]}, "tool_choice = {'type': 'some'}: its type is auto, any"),
        (
            {"thinking": {"type": "enabled"}},
            "thinking = {'type': 'enabled'}: its type is adaptive, disabled, or enabled",
        ),
    ],
)
def test_a_wrong_body_is_told_the_field_the_value_and_the_remedy(body: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**body)
    assert str(caught.value).startswith(told)
    assert caught.value.param


def test_a_body_without_a_limit_can_be_counted() -> None:
    turn = Messages().read_prompt({"model": "policy", "messages": [HELLO, {"role": "assistant", "content": "So"}]})
    assert len(turn.messages) == 2
    assert turn.max_tokens is None


@pytest.fixture
def server() -> Answering:
    return Answering(Messages(), "/v1/messages")


@pytest.fixture
async def client(server: Answering) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        server.running() as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0, timeout=10.0) as client,
    ):
        yield client


ASKED: Any = {"model": "policy", "max_tokens": 50, "messages": [HELLO], "tools": [TOOL]}
WORDY: Any = {
    "reasoning": "Where?",
    "content": "I look.\u2028",
    "tool_calls": [call("c1", "weather", '{"city":"Malmö"}'), call("", "weather", "")],
}
BLOCKS = [
    {"type": "thinking", "thinking": "Where?", "signature": "a1"},
    {"type": "text", "text": "I look.\u2028"},
    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Malmö"}},
    {"type": "tool_use", "id": "call_a1_1", "name": "weather", "input": {}},
]


async def test_the_client_reads_a_message(server: Answering, client: anthropic.AsyncAnthropic) -> None:
    server.answer = answer_of("tool_calls", **WORDY)
    message = await client.messages.create(**ASKED)
    assert [block.to_dict() for block in message.content] == BLOCKS
    assert (message.id, message.stop_reason, message.model) == ("msg_a1", "tool_use", "policy")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (10, 20, 7)


async def test_a_stream_adds_up_to_the_message(server: Answering, client: anthropic.AsyncAnthropic) -> None:
    server.answer = answer_of("tool_calls", **WORDY)
    async with client.messages.stream(**ASKED) as stream:
        events = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    whole = await client.messages.create(**ASKED)
    assert streamed.model_dump(exclude_none=True) == whole.model_dump(exclude_none=True)


async def test_a_replayed_message_is_the_message_that_was_answered(
    server: Answering, client: anthropic.AsyncAnthropic
) -> None:
    server.answer = answer_of("tool_calls", **WORDY)
    message = await client.messages.create(**ASKED)
    results: Any = [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}]
    history: Any = [HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    await client.messages.create(**ASKED | {"messages": history})
    replayed = server.turns[-1].messages[1]
    assert (replayed["content"], replayed["reasoning"]) == (WORDY["content"], WORDY["reasoning"])
    assert [json.loads(one["function"]["arguments"]) for one in replayed["tool_calls"]] == [{"city": "Malmö"}, {}]


@pytest.mark.parametrize(
    ("finish", "stop", "message", "reason", "sequence"),
    [
        ("stop", None, {"content": "Hi."}, "end_turn", None),
        ("stop", 151645, {"content": "Hi."}, "end_turn", None),
        ("stop", "\n\n", {"content": "Hi."}, "stop_sequence", "\n\n"),
        ("length", None, {"content": "Hi"}, "max_tokens", None),
        ("length", None, {"tool_calls": [call("c", "weather", "{")]}, "max_tokens", None),
        ("stop", None, {"tool_calls": [call("c", "weather", "{}")]}, "tool_use", None),
        ("stop", None, {"content": ""}, "end_turn", None),
    ],
)
async def test_the_end_has_its_reason(
    server: Answering,
    client: anthropic.AsyncAnthropic,
    finish: str,
    stop: Any,
    message: Any,
    reason: str,
    sequence: Any,
) -> None:
    server.answer = answer_of(finish, stop, **message)
    whole = await client.messages.create(**ASKED)
    async with client.messages.stream(**ASKED) as stream:
        streamed = await stream.get_final_message()
    for got in (whole, streamed):
        assert (got.stop_reason, got.stop_sequence) == (reason, sequence)
        assert got.content


@pytest.mark.parametrize(
    ("error", "caught", "kind"),
    [
        (errors.InvalidRequest("no"), anthropic.BadRequestError, "invalid_request_error"),
        (errors.NotAllowed("no", known=False), anthropic.AuthenticationError, "authentication_error"),
        (errors.NotAllowed("no", known=True), anthropic.PermissionDeniedError, "permission_error"),
        (errors.UnknownModel("no"), anthropic.NotFoundError, "not_found_error"),
        (errors.BodyTooLarge("no"), anthropic.ContentTooLargeError, "request_too_large"),
        (errors.TooManyRequests("no"), anthropic.RateLimitError, "rate_limit_error"),
        (errors.EngineFailed("no"), anthropic.InternalServerError, "api_error"),
        (errors.DeadlineExceeded("no"), anthropic.GatewayTimeoutError, "timeout_error"),
        (
            errors.EngineRefused("?", status=400, body={"error": {"message": "no", "type": "BadRequestError"}}),
            anthropic.BadRequestError,
            "invalid_request_error",
        ),
    ],
)
async def test_an_error_is_of_the_clients_own_kind(
    server: Answering, client: anthropic.AsyncAnthropic, error: RolloutGatewayError, caught: Any, kind: str
) -> None:
    server.error = error
    with pytest.raises(caught) as raised:
        await client.messages.create(**ASKED)
    assert raised.value.body == {"type": "error", "error": {"type": kind, "message": "no"}}


async def test_an_error_ends_a_stream_that_has_begun(server: Answering, client: anthropic.AsyncAnthropic) -> None:
    server.late_error = errors.EngineFailed("the engine died")
    with pytest.raises(anthropic.APIStatusError, match="the engine died"):
        async with client.messages.stream(**ASKED) as stream:
            await stream.get_final_message()
