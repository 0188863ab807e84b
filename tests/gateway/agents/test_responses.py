"""OpenAI's Responses, in the words of its own client."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("openai")

import openai

from engines import errors
from engines.errors import InvalidRequest, RolloutGatewayError
from gateway.agents.responses import Responses
from gateway.agents.turn import Turn
from tests.rigs.answering import Answering, answer_of, call

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": None}
SHOWN_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA},
}
SPACE: Any = {"type": "namespace", "name": "crew", "description": "Agents.", "tools": [TOOL | {"name": "spawn"}]}
PNG = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
SHOWN_PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


def said(text: str) -> Any:
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def called(call_id: str, arguments: str, **more: str) -> Any:
    return {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": arguments} | more


def told(call_id: str, output: Any) -> Any:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def read(**body: Any) -> Turn:
    return Responses().read({"model": "policy", "input": "hello"} | body)


ODD = '{"city":"Malm\\u00f6" , "a":1}'


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
        (
            [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "see"}, PNG]}],
            [{"role": "user", "content": [{"type": "text", "text": "see"}, SHOWN_PNG]}],
        ),
        (
            [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}],
            [{"role": "developer", "content": "Be brief."}],
        ),
        (
            [THOUGHT, said("I look."), called("c1", ODD), called("c2", "{}"), told("c1", "rain"), told("c2", "sun")],
            [
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning": "Hm.",
                    "tool_calls": [call("c1", "weather", ODD), call("c2", "weather", "{}")],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                {"role": "tool", "tool_call_id": "c2", "content": "sun"},
            ],
        ),
        (
            [called("c1", "{}"), said("So."), THOUGHT, said("Well.")],
            [
                {"role": "assistant", "content": None, "tool_calls": [call("c1", "weather", "{}")]},
                {"role": "assistant", "content": "So."},
                {"role": "assistant", "content": "Well.", "reasoning": "Hm."},
            ],
        ),
        (
            [told("c1", [{"type": "input_text", "text": "a"}, PNG]), told("c2", "b")],
            [
                {"role": "tool", "tool_call_id": "c1", "content": "a"},
                {"role": "tool", "tool_call_id": "c2", "content": "b"},
                {"role": "user", "content": [SHOWN_PNG]},
            ],
        ),
        (
            [called("c1", "{}", namespace="crew")],
            [{"role": "assistant", "content": None, "tool_calls": [call("c1", "crew__weather", "{}")]}],
        ),
        (
            [THOUGHT | {"content": None, "summary": [{"type": "summary_text", "text": "Hm."}]}],
            [{"role": "assistant", "content": None, "reasoning": "Hm."}],
        ),
    ],
)
def test_items_become_the_messages_of_a_chat(given: Any, shown: Any) -> None:
    assert read(input=given).messages == shown


def test_instructions_stand_first() -> None:
    assert read(instructions="Be brief.").messages[0] == {"role": "system", "content": "Be brief."}


def test_tools_of_a_namespace_have_its_name_and_searches_of_the_web_are_left_out() -> None:
    turn = read(tools=[TOOL, SPACE, {"type": "web_search"}])
    assert turn.tools[0] == SHOWN_TOOL
    assert [tool["function"]["name"] for tool in turn.tools] == ["weather", "crew__spawn"]


@pytest.mark.parametrize(
    ("body", "turn"),
    [
        ({"temperature": 0.5, "top_p": 1, "seed": 3}, {"sampling": {"temperature": 0.5, "top_p": 1, "seed": 3}}),
        ({"max_output_tokens": 5, "stream": True}, {"max_tokens": 5, "streams": True}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"template": {"reasoning_effort": "low"}}),
        ({"tools": [TOOL], "parallel_tool_calls": False}, {"template": {"parallel_tool_calls": False}}),
        ({"tools": [TOOL]}, {"tool_choice": "auto"}),
        ({"tools": [TOOL], "tool_choice": "required"}, {"tool_choice": "required"}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"template": {}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}}},
            {"template": {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}}},
        ),
        (
            {
                "store": False,
                "include": ["reasoning.encrypted_content"],
                "client_metadata": {},
                "prompt_cache_key": "k",
            },
            {"template": {}, "sampling": {}},
        ),
    ],
)
def test_fields_go_where_the_engine_reads_them(body: Any, turn: Any) -> None:
    got = read(**body)
    assert {name: getattr(got, name) for name in turn} == turn


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id = 'resp_1': responses are not kept: send the whole"),
        ({"background": True}, "background = True: a response is not kept for later: use stream"),
        ({"conversation": "c"}, "conversation = 'c': conversations are not kept"),
        ({"input": None}, "input: a field that is missing"),
        ({"input": []}, "input = []: give a text, or at least one item"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0] = {'id': 'x', 'type': 'item_reference'}: an item",
        ),
        (
            {"input": [{"role": "bot", "content": "x"}]},
            "input[0] = {'content': 'x', 'role': 'bot'}: an item is a message",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0] = {'file_id': 'f', 'type': 'input_file'}: a part is input_text",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
            "input[0].encrypted_content = 'gAAA': another server has encrypted it: leave the item out",
        ),
        (
            {"tools": [{"type": "custom", "name": "patch"}]},
            "tools[0] = {'name': 'patch', 'type': 'custom'}: give function",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice = {'type': 'mcp'}: there are auto, none"),
        ({"include": ["message.output_text.logprobs"]}, "include = 'message.output_text.logprobs': log-probs are in"),
        ({"max_output_tokens": 0}, "max_output_tokens = 0: give at least 1"),
        ({"temperature": "hot"}, "temperature: Expected `float"),
        ({"text": {"format": {"type": "xml"}}}, "text.format = {'type': 'xml'}: there are text, json_object"),
    ],
)
def test_a_wrong_body_is_told_the_field_the_value_and_the_remedy(body: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**body)
    assert str(caught.value).startswith(said)
    assert caught.value.param


@pytest.fixture
def server() -> Answering:
    return Answering(Responses(), "/v1/responses")


@pytest.fixture
async def client(server: Answering) -> AsyncIterator[openai.AsyncOpenAI]:
    async with server.asked_by_openai() as client:
        yield client


ASKED: Any = {"model": "policy", "input": "hello", "tools": [TOOL, SPACE], "instructions": "Be brief."}
WORDY: Any = {
    "reasoning": "Where?",
    "content": "I look.\u2028",
    "tool_calls": [call("c1", "weather", ODD), call("c2", "crew__spawn", "{}")],
}


async def test_the_client_reads_a_response(server: Answering, client: openai.AsyncOpenAI) -> None:
    server.answer = answer_of("tool_calls", **WORDY)
    response: Any = await client.responses.create(**ASKED)
    thought, message, first, second = response.output
    assert (thought.content[0].text, message.content[0].text) == ("Where?", "I look.\u2028")
    assert (first.call_id, first.name, first.namespace, first.arguments) == ("c1", "weather", None, ODD)
    assert (second.call_id, second.name, second.namespace) == ("c2", "spawn", "crew")
    assert (response.status, response.output_text, response.instructions) == ("completed", "I look.\u2028", "Be brief.")
    usage = response.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (30, 20)
    assert (usage.output_tokens, usage.total_tokens) == (7, 37)


async def test_a_stream_adds_up_to_the_response(server: Answering, client: openai.AsyncOpenAI) -> None:
    server.answer = answer_of("tool_calls", **WORDY)
    async with client.responses.stream(**ASKED) as stream:
        events: Any = [event async for event in stream]
        streamed = await stream.get_final_response()
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = await client.responses.create(**ASKED)
    shown = [
        item.model_dump(exclude={"parsed_arguments": True, "content": {0: {"parsed"}}}) for item in streamed.output
    ]
    assert shown == [item.model_dump() for item in whole.output]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == shown


async def test_a_replayed_response_is_the_message_that_was_answered(
    server: Answering, client: openai.AsyncOpenAI
) -> None:
    server.answer = answer_of("tool_calls", **WORDY)
    response = await client.responses.create(**ASKED)
    history: Any = [*(item.to_dict() for item in response.output), told("c1", "rain"), told("c2", "sun")]
    await client.responses.create(**ASKED | {"input": [{"role": "user", "content": "hello"}, *history]})
    assert server.turns[-1].messages[2] == {"role": "assistant", **WORDY}


async def test_an_answer_that_was_cut_is_incomplete(server: Answering, client: openai.AsyncOpenAI) -> None:
    server.answer = answer_of("length", content="Hel")
    whole = await client.responses.create(**ASKED)
    async with client.responses.stream(**ASKED) as stream:
        events: Any = [event async for event in stream]
    for response in (whole, events[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[0].status == "incomplete"
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    ("error", "caught"),
    [
        (errors.InvalidRequest("no", param="input"), openai.BadRequestError),
        (errors.NotAllowed("no", known=False), openai.AuthenticationError),
        (errors.UnknownModel("no"), openai.NotFoundError),
        (errors.TooManyRequests("no"), openai.RateLimitError),
        (errors.EngineFailed("no"), openai.InternalServerError),
    ],
)
async def test_an_error_is_of_the_clients_own_kind(
    server: Answering, client: openai.AsyncOpenAI, error: RolloutGatewayError, caught: Any
) -> None:
    server.error = error
    with pytest.raises(caught, match="no") as raised:
        await client.responses.create(**ASKED)
    assert raised.value.param == getattr(error, "param", None)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.EngineFailed("the engine died"), "server_error"),
        (errors.TooManyRequests("full"), "rate_limit_exceeded"),
        (errors.InvalidRequest("too long"), "invalid_prompt"),
    ],
)
async def test_an_error_ends_a_stream_that_has_begun(
    server: Answering, client: openai.AsyncOpenAI, error: RolloutGatewayError, code: str
) -> None:
    server.late_error = error
    events: Any = [event async for event in await client.responses.create(**ASKED, stream=True)]
    assert events[-1].type == "response.failed"
    assert (events[-1].response.error.code, events[-1].response.error.message) == (code, str(error))
