"""A chunk without readable choices is a failure of its engine: the rollout goes on elsewhere."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest

from engines.engine import Engine
from gateway.dialects import completions
from tests.rigs.rig import Json, Rig

LENGTH = 80
SAMPLING: Json = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.0}


class OddEngine:
    """An engine whose streams begin with an odd chunk."""

    reply = Engine.reply

    def __init__(self, engine: Any, chunk: Json) -> None:
        self._engine = engine
        self._chunk = chunk
        self.num_streams = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def events(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[list[bytes]]:
        self.num_streams += 1
        await self.may_answer.wait()
        yield [orjson.dumps(self._chunk)]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_sample_that_a_pause_aborts_before_its_first_token_is_an_empty_one(rig: Rig, is_stream: bool) -> None:
    """vLLM sends nothing for it."""
    told = {"index": 0, "text": "a", "token_ids": [9], "finish_reason": "abort"}
    odd = [OddEngine(reader.engine, {"choices": [told]}) for reader in rig.readers.values()]
    for reader, engine in zip(rig.readers.values(), odd, strict=True):
        reader.engine = engine  # type: ignore[assignment]
        engine.may_answer.clear()
    body = SAMPLING | {"model": "sim", "prompt": "a", "n": 2, "temperature": 1.0, "return_token_ids": True}
    path = completions.PATH
    asked: asyncio.Task[Any] = asyncio.create_task(rig.stream(path, body) if is_stream else rig.post(path, body))
    while not any(engine.num_streams for engine in odd):
        await asyncio.sleep(0.01)
    assert (await rig.post("/pause?mode=abort"))[0] == 200
    for engine in odd:
        engine.may_answer.set()
    replies = await asked if is_stream else [(await asked)[1]]
    choices = {choice["index"]: choice for reply in replies for choice in reply["choices"]}
    assert {index: choice["finish_reason"] for index, choice in choices.items()} == {0: "abort", 1: "abort"}
    assert (choices[1]["text"], choices[1]["token_ids"]) == ("", [])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "chunk",
    [
        {"object": "ping"},
        {"choices": None},
        {"choices": [None]},
        {"choices": [{"text": "a", "token_ids": [9], "finish_reason": None}]},
        {"choices": [{"index": 5, "text": "a", "token_ids": [9], "finish_reason": None}]},
        {"choices": [{"index": -1, "text": "a", "token_ids": [9], "finish_reason": None}]},
    ],
)
async def test_an_odd_chunk_moves_the_rollout_to_another_replica(rig: Rig, chunk: Json, is_stream: bool) -> None:
    path, body = completions.PATH, SAMPLING | {"model": "sim", "prompt": [[5, 6, 7]]}
    reader = rig.readers["engine-0"]
    reader.engine = odd = OddEngine(reader.engine, chunk)  # type: ignore[assignment]  # all but its streams is its own
    while not odd.num_streams:
        async with rig.client.post(rig.url + path, json=body | ({"stream": True} if is_stream else {})) as response:
            text = await response.text()
        assert response.status == 200, text
        assert '"error"' not in text
        assert text.count('"finish_reason":"length"') == 1
