"""A chunk without readable choices is a failure of its engine: the rollout goes on elsewhere."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.dialects import chat, completion_prompt, token_generation
from tests.rigs.rig import Json, Rig

LENGTH = 80
SAMPLING: Json = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.0}


class OddEngine:
    """An engine whose streams begin with an odd chunk."""

    def __init__(self, engine: Any, chunk: Json) -> None:
        self._engine = engine
        self._chunk = chunk
        self.num_streams = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def stream(self, path: str, body: Json, timeout_s: float) -> AsyncGenerator[Json]:
        self.num_streams += 1
        yield dict(self._chunk)


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
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (completion_prompt.PATH, SAMPLING | {"model": "sim", "prompt": [[5, 6, 7]]}),
        (chat.PATH, SAMPLING | {"model": "sim", "messages": [{"role": "user", "content": "hello"}]}),
        (token_generation.PATH, {"token_ids": [5, 6, 7], "sampling_params": SAMPLING}),
    ],
)
async def test_an_odd_chunk_moves_the_rollout_to_another_replica(
    rig: Rig, path: str, body: Json, chunk: Json, is_stream: bool
) -> None:
    odd = OddEngine(rig.fleet.replicas[0].engine, chunk)
    rig.fleet.replicas[0].engine = odd  # type: ignore[assignment]  # all but its streams is the engine's
    while not odd.num_streams:
        async with rig.client.post(rig.url + path, json=body | ({"stream": True} if is_stream else {})) as response:
            text = await response.text()
        assert response.status == 200, text
        assert '"error"' not in text
        assert text.count('"finish_reason":"length"') == 1
