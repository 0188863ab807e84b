"""OpenAI's own Python client, unchanged but for its base_url."""

from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from tests.rigs.rig import Rig
from tests.running.client_records import runs_client

if TYPE_CHECKING:
    import openai

pytestmark = runs_client(
    "OpenAI Python", "openai", ran="chat, completions, tools, streams, errors", against="2 simulated engines"
)

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def sdk() -> ModuleType:
    return pytest.importorskip("openai")  # a second of CPU to load


@pytest.fixture
async def connect(sdk: ModuleType) -> "AsyncIterator[Callable[..., openai.AsyncOpenAI]]":
    """Makes clients of a rig that do not try again by themselves."""
    clients: list[openai.AsyncOpenAI] = []

    def make(rig: Rig, **settings: Any) -> "openai.AsyncOpenAI":
        usual: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 10.0}
        clients.append(sdk.AsyncOpenAI(base_url=f"{rig.url}/v1", **usual | settings))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def client(rig: Rig, connect: "Callable[..., openai.AsyncOpenAI]") -> "openai.AsyncOpenAI":
    return connect(rig)


async def test_models_are_listed_and_retrieved(client: "openai.AsyncOpenAI") -> None:
    assert [model.id async for model in client.models.list()] == ["sim"]
    assert (await client.models.retrieve("sim")).id == "sim"


async def test_an_unknown_model_is_not_found(sdk: ModuleType, client: "openai.AsyncOpenAI") -> None:
    with pytest.raises(sdk.NotFoundError, match="'gpt-9' is not served here; there is sim"):
        await client.models.retrieve("gpt-9")
    with pytest.raises(sdk.NotFoundError):
        await client.chat.completions.create(model="gpt-9", messages=HELLO)


async def test_completions_have_n_choices_with_logprobs(client: "openai.AsyncOpenAI") -> None:
    reply = await client.completions.create(model="sim", prompt=["ab", "cd"], n=2, logprobs=3, max_tokens=4)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs or ()) == len(choice.logprobs.top_logprobs or ()) == 4
    assert reply.usage is not None
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (16, 16 + reply.usage.prompt_tokens)


async def test_chat_has_n_choices_with_top_logprobs(client: "openai.AsyncOpenAI") -> None:
    reply = await client.chat.completions.create(
        model="sim", messages=HELLO, n=3, logprobs=True, top_logprobs=2, max_completion_tokens=5
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    for choice in reply.choices:
        assert choice.message.role == "assistant"
        assert choice.logprobs is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content or ()] == [2] * 5


async def test_a_stream_tells_its_usage_in_the_last_chunk_alone(client: "openai.AsyncOpenAI") -> None:
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="sim", messages=HELLO, max_tokens=9, n=2, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert all("usage" in chunk.model_fields_set for chunk in chunks)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 18


async def test_weight_versions_are_extra_fields_of_a_choice(client: "openai.AsyncOpenAI") -> None:
    reply = await client.completions.create(model="sim", prompt="ab", max_tokens=4)
    assert reply.choices[0].model_extra["weight_versions"] == [{"version": 0, "start": 0, "end": 4}]  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": "usage"}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"user": 7}, "user"),
    ],
)
async def test_bad_requests_name_the_field(
    sdk: ModuleType, client: "openai.AsyncOpenAI", change: Any, param: str
) -> None:
    with pytest.raises(sdk.BadRequestError) as caught:
        await client.chat.completions.create(**{"model": "sim", "messages": HELLO} | change)
    assert caught.value.param == param
