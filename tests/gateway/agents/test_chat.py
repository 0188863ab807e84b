"""Chat completions inside a session, in the words of OpenAI's own client."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("openai")

import openai

from engines import errors
from engines.errors import InvalidRequest
from gateway.agents.chat import ChatCompletions
from gateway.agents.media import media_in
from gateway.agents.turn import Turn
from tests.rigs.answering import Answering, answer_of, call

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def read(**body: Any) -> Turn:
    return ChatCompletions().read({"model": "policy", "messages": HELLO} | body)


def test_a_body_is_nearly_a_turn() -> None:
    turn = read(
        tools=[TOOL],
        max_completion_tokens=5,
        temperature=0.5,
        stop="\n",
        reasoning_effort="low",
        response_format={"type": "json_object"},
        chat_template_kwargs={"a": 1},
        return_token_ids=True,
        user="u",
        stream=True,
    )
    assert (turn.model, turn.messages, turn.tools, turn.tool_choice) == ("policy", HELLO, [TOOL], "auto")
    assert turn.sampling == {"temperature": 0.5, "stop": "\n"}
    assert turn.template == {
        "reasoning_effort": "low",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"a": 1},
    }
    assert (turn.max_tokens, turn.streams) == (5, True)
    assert read(max_tokens=4).max_tokens == 4


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_comes_back_under_either_name(name: str) -> None:
    turn = read(messages=[*HELLO, {"role": "assistant", "content": None, name: "Hm."}, *HELLO])
    assert turn.messages[1] == {"role": "assistant", "content": None, "reasoning": "Hm."}


def test_parts_of_a_message_are_those_that_vllm_takes() -> None:
    """It takes texts alone too, and skips those that are null."""
    turn = read(messages=[{"role": "user", "content": ["see", {"type": "text", "text": None}, {"type": "thinking"}]}])
    assert turn.messages[0]["content"] == [{"type": "text", "text": "see"}, {"type": "thinking"}]
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[1\] = 5"):
        read(messages=[{"role": "user", "content": ["see", 5]}])
    assert list(media_in(turn.messages)) == []


def test_notes_of_a_client_are_left_out_of_messages() -> None:
    replayed = {"role": "assistant", "content": "", "tool_calls": [call("c1", "weather", "{}") | {"index": 0}]}
    turn = read(messages=[*HELLO, replayed | {"provider_specific_fields": {}, "refusal": None}, *HELLO])
    assert turn.messages[1] == {"role": "assistant", "content": None, "tool_calls": [call("c1", "weather", "{}")]}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"messages": []}, "messages = []: give at least one message"),
        ({"messages": "hello"}, "messages: Expected `array`, got `str`, it is 'hello'"),
        ({"messages": [{"role": "bot"}]}, "messages[0].role = 'bot': there are system, developer, user, assistant"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content = 7: give a text or a list of parts"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c1"}]}]},
            "messages[0].tool_calls[0] = {'id': 'c1'}: a call has an id and a function",
        ),
        ({"n": 2}, "n = 2: a turn of a session is one answer: send a request for each"),
        ({"logprobs": True}, "logprobs = True: log-probs are in the record of the session"),
        ({"tools": [{"type": "custom"}]}, "tools[0] = {'type': 'custom'}: a tool is a function with its name"),
        ({"temperature": "hot"}, "temperature = 'hot' must be a number"),
        ({"max_tokens": 0}, "max_tokens = 0 must be a whole number of at least 1"),
    ],
)
def test_a_wrong_body_is_told_the_field_the_value_and_the_remedy(body: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**body)
    assert str(caught.value).startswith(told)
    assert caught.value.param


@pytest.fixture
def server() -> Answering:
    return Answering(ChatCompletions(), "/v1/chat/completions")


@pytest.fixture
async def client(server: Answering) -> AsyncIterator[openai.AsyncOpenAI]:
    async with server.asked_by_openai() as client:
        yield client


ASKED: Any = {"model": "policy", "messages": HELLO, "tools": [TOOL]}
WORDY: Any = {
    "reasoning": "Where?",
    "content": "I look.\u2028",
    "tool_calls": [call("c1", "weather", '{"city":"Malm\\u00f6"}'), call("c2", "weather", "{}")],
}


async def test_the_client_reads_a_completion(server: Answering, client: openai.AsyncOpenAI) -> None:
    server.answer = answer_of("tool_calls", **WORDY)
    completion: Any = await client.chat.completions.create(**ASKED)
    [choice] = completion.choices
    assert choice.message.to_dict() == {"role": "assistant", "reasoning_content": "Where?", **WORDY}
    assert (choice.finish_reason, completion.model) == ("tool_calls", "policy")
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (30, 7)
    assert completion.usage.prompt_tokens_details.cached_tokens == 20


async def test_a_stream_adds_up_to_the_completion(server: Answering, client: openai.AsyncOpenAI) -> None:
    server.answer = answer_of("tool_calls", **WORDY)
    async with client.chat.completions.stream(**ASKED, stream_options={"include_usage": True}) as stream:
        streamed: Any = await stream.get_final_completion()
    whole: Any = await client.chat.completions.create(**ASKED)
    assert streamed.usage == whole.usage
    got, expected = streamed.choices[0], whole.choices[0]
    assert (got.finish_reason, got.message.content) == (expected.finish_reason, expected.message.content)
    assert [one.function.arguments for one in got.message.tool_calls] == [
        one.function.arguments for one in expected.message.tool_calls
    ]
    assert got.message.reasoning == "Where?"


async def test_usage_is_streamed_only_where_it_is_asked_for(server: Answering, client: openai.AsyncOpenAI) -> None:
    chunks = [chunk async for chunk in await client.chat.completions.create(**ASKED, stream=True)]
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello."


async def test_an_error_is_of_the_clients_own_kind(server: Answering, client: openai.AsyncOpenAI) -> None:
    server.error = errors.TooManyRequests("full")
    with pytest.raises(openai.RateLimitError, match="full"):
        await client.chat.completions.create(**ASKED)


async def test_an_error_ends_a_stream_that_has_begun(server: Answering, client: openai.AsyncOpenAI) -> None:
    server.late_error = errors.EngineFailed("the engine died")
    with pytest.raises(openai.APIError, match="the engine died"):
        async for _ in await client.chat.completions.create(**ASKED, stream=True):
            pass
