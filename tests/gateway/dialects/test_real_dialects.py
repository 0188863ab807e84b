"""Every dialect in front of two real vLLM replicas on CPU, whose random weights write bytes."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

import openai

from loadtests.shapes import tokenizer
from tests.rigs.engines.real_vllm import RealFleet, app, engine_config, standing

pytestmark = pytest.mark.vllm

VOCABULARY = 512
# Tools and their results are written out, as models that know them have it.
CHAT_TEMPLATE = (
    "{% if tools %}{{ 'tools: ' + tools | tojson + '\n' }}{% endif %}"
    "{% for message in messages %}{{ message['role'] + ': ' + (message['content'] or '') }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
HELLO: Any = [{"role": "user", "content": "What is the weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": SCHEMA}}
PATH = "/inference/v1/generate"
IDS = [40 + i for i in range(12)]


def write_model(folder: Path) -> Path:
    end = VOCABULARY - 1
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 2048,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
    }
    files: dict[str, Any] = {
        "config.json": config | {"bos_token_id": end, "eos_token_id": end},
        "tokenizer.json": tokenizer(VOCABULARY),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
        },
    }
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    folder = tmp_path_factory.mktemp("dialects")
    engine = engine_config(write_model(folder / "bytes"), folder)
    extra = {
        "load_format": "dummy",
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "enable_prompt_tokens_details": True,
        "block_size": 32,
        "structured_outputs_config": {
            "backend": "xgrammar",
            "disable_any_whitespace": True,
        },  # random weights love nothing more
    }
    levers = {"num_replicas": 2, "max_model_len": 2048, "served_model_name": "bytes", "extra": extra}
    with app({"engine": engine.model_copy(update=levers)}) as running:
        yield running


@pytest.fixture
def client(real: RealFleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=60.0) as connected:
        yield connected


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "bytes", "messages": HELLO, "max_tokens": 150, "seed": 1} | more)


def test_usage_stands_in_every_chunk_where_that_is_asked_for(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked: Any = {"stream": True, "stream_options": options, "max_tokens": 20}
    for chunks in (ask(client, **asked), client.completions.create(model="bytes", prompt="ab", **asked)):
        assert all(chunk.usage is not None for chunk in chunks)


def test_a_tool_that_is_demanded_is_called_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    for choice in ({"type": "function", "function": {"name": "weather"}}, "required"):
        message = ask(client, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False).choices[0].message
        (call,) = message.tool_calls[:1]
        assert call.function.name == "weather"
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city", "warm"}
        assert arguments["city"] in ("Oslo", "Rome")


def test_a_demanded_tool_is_streamed_in_pieces(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    chunks = list(ask(client, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "weather"
    assert set(json.loads("".join(call.function.arguments or "" for call in calls))) == {"city", "warm"}


def test_the_result_of_a_tool_goes_back_into_the_conversation(client: openai.OpenAI) -> None:
    message = ask(client, tools=[TOOL], tool_choice="required", parallel_tool_calls=False).choices[0].message
    turn = [
        *HELLO,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"},
    ]
    after = ask(client, messages=turn, tools=[TOOL], tool_choice="none")
    assert after.choices[0].message.content is not None
    assert after.usage.prompt_tokens > ask(client, tools=[TOOL], tool_choice="none").usage.prompt_tokens


def test_tools_that_are_left_to_the_model_change_its_prompt(client: openai.OpenAI) -> None:
    with_tools = ask(client, tools=[TOOL], tool_choice="auto")
    assert with_tools.usage.prompt_tokens > ask(client).usage.prompt_tokens + 50
    assert with_tools.choices[0].finish_reason in ("stop", "length")


def test_what_the_engine_refuses_of_tools_comes_back_as_it_said_it(real: RealFleet, client: openai.OpenAI) -> None:
    wrong: Any = {"type": "function", "function": {"name": "unknown"}}
    body = {"model": "bytes", "messages": HELLO, "tools": [TOOL], "tool_choice": wrong}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[TOOL], tool_choice=wrong)
    direct = replace(real, url=real.replicas[0].url).call("/v1/chat/completions", body)
    assert direct == (caught.value.status_code, {"error": caught.value.body})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_follow_a_json_schema(client: openai.OpenAI, temperature: float) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    told = json.loads(ask(client, response_format=asked, temperature=temperature).choices[0].message.content)
    assert set(told) == {"city", "warm"}


def test_structured_outputs_of_vllm_reach_it_too(client: openai.OpenAI) -> None:
    body = {"structured_outputs": {"regex": "[ab]{3}"}}
    chat = ask(client, extra_body=body).choices[0].message.content
    text = client.completions.create(model="bytes", prompt="x", extra_body=body, max_tokens=9).choices[0].text
    assert {len(chat), len(text)} == {3}
    assert set(chat + text) <= {"a", "b"}


def test_errors_are_those_of_the_client(real: RealFleet, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        ask(client, model="gpt-9")
    with pytest.raises(openai.BadRequestError, match="top_p"):
        ask(client, top_p=7)
    with standing(real), pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(
            model="bytes", prompt="ab", max_tokens=1500, extra_body={"ignore_eos": True}
        )


def test_turns_of_an_agent_find_their_prefix_in_the_cache(client: openai.OpenAI) -> None:
    """Six agents of four turns: with sessions every turn but the first finds what came before it."""
    cached = {
        with_sessions: _cached_share(client, f"run {with_sessions}", with_sessions=with_sessions)
        for with_sessions in (False, True)
    }
    print("cached share of the prompt tokens of later turns, by sessions:", cached)
    assert cached[True] > 0.85
    assert cached[True] > cached[False]


def test_token_ids_in_and_out_with_the_engines_own_spans(real: RealFleet) -> None:
    body: dict[str, Any] = {"token_ids": IDS, "request_id": "mine"}
    body["sampling_params"] = {"max_tokens": 7, "n": 2, "logprobs": 1, "seed": 3, "ignore_eos": True}
    status, reply = real.call(PATH, body | {"return_token_ids": True})
    assert status == 200, reply
    assert "mine" in reply["request_id"]
    assert reply["prompt_token_ids"] == IDS
    for choice in reply["choices"]:
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 7}]
        assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    completed = {"prompt": IDS, "max_tokens": 7, "n": 2, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    _, other = real.call("/v1/completions", completed)
    assert [c["token_ids"] for c in reply["choices"]] == [c["token_ids"] for c in other["choices"]]


def test_token_ids_are_streamed(real: RealFleet) -> None:
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 40, "seed": 3, "ignore_eos": True}}
    _, whole = real.call(PATH, body)
    chunks = real.stream(PATH, body | {"stream_options": {"include_usage": True}})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [i for choice in choices for i in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert choices[-1]["weight_versions"] == [{"version": "0", "start": 0, "end": 40}]
    assert chunks[-1]["usage"]["completion_tokens"] == 40


def test_a_rendered_conversation_can_be_generated(real: RealFleet) -> None:
    body = {"model": "bytes", "messages": HELLO, "max_tokens": 12, "seed": 5}
    status, rendered = real.call("/v1/chat/completions/render", body)
    assert status == 200, rendered
    given = {key: value for key, value in rendered.items() if value is not None}
    status, reply = real.call(PATH, given | {"output_mode": "text"})
    assert status == 200, reply
    _, chat = real.call("/v1/chat/completions", body)
    assert reply["choices"][0]["text"] == chat["choices"][0]["message"]["content"]


def _cached_share(client: openai.OpenAI, run: str, *, with_sessions: bool) -> float:
    """Share of the prompt tokens that came from the prefix cache, over all turns but the first of each agent."""

    async def agent(number: int, connected: openai.AsyncOpenAI) -> tuple[int, int]:
        messages: Any = [{"role": "user", "content": f"{run}: I am agent {number}. " + "x" * 900}]
        headers = {"X-Session-ID": f"{run} {number}"} if with_sessions else {}
        cached = asked = 0
        for turn in range(4):
            reply = await connected.chat.completions.create(
                model="bytes", messages=messages, max_tokens=40, extra_headers=headers, extra_body={"ignore_eos": True}
            )
            assert reply.usage is not None
            if turn:
                details = reply.usage.prompt_tokens_details
                cached += (details.cached_tokens if details else 0) or 0
                asked += reply.usage.prompt_tokens
            messages += [{"role": "assistant", "content": "y" * 40}, {"role": "user", "content": f"{number} goes on"}]
        return cached, asked

    async def all_agents() -> float:
        async with openai.AsyncOpenAI(base_url=str(client.base_url), api_key="none", timeout=60.0) as connected:
            counts = await asyncio.gather(*(agent(number, connected) for number in range(6)))
        return sum(cached for cached, _ in counts) / sum(asked for _, asked in counts)

    return asyncio.run(all_agents())
