"""Rollouts are what their engines made, which are read beside them."""

from typing import Any

import pytest

from tests.rigs.rig import Rig, StartRig

Json = dict[str, Any]

LENGTH = 80
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: Json = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
BODY: Json = GREEDY | {"model": "sim", "prompt": [5, 6], "logprobs": 0, "return_token_ids": True}
VARYING = ("id", "created", "request_id")


async def told(rig: Rig, path: str, body: Json) -> Json:
    status, reply = await rig.post(path, body)
    assert status == 200, reply
    return {key: value for key, value in reply.items() if key not in VARYING}


async def asked(rig: Rig, path: str, body: Json) -> tuple[int, Json]:
    """The engine's own answer."""
    async with rig.client.post(rig.replicas[0].info.url + path, json=body) as response:
        return response.status, await response.json()


def of_engine(theirs: Json, ours: Json) -> Json:
    """What the gateway told of the fields that the engine tells."""
    return {key: ours[key] for key in theirs}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, BODY),
        (COMPLETIONS, BODY | {"n": 4, "temperature": 1.0, "seed": 3}),
        (COMPLETIONS, BODY | {"max_tokens": 3, "logprobs": 2}),
        (CHAT, GREEDY | {"messages": [{"role": "user", "content": "hello"}], "logprobs": True}),
    ],
)
async def test_a_reply_has_what_its_engine_tells(start_rig: StartRig, path: str, body: Json) -> None:
    rig = await start_rig(1)
    ours, (status, theirs) = await told(rig, path, body), await asked(rig, path, body)
    assert status == 200
    for own, choice in zip(ours["choices"], theirs["choices"], strict=True):
        versions = [span.pop("version") for span in choice["weight_versions"] + own["weight_versions"]]
        assert versions == ["default", 0]
        assert of_engine(choice, own) == choice
    tokens = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [ours["usage"][field] for field in tokens] == [theirs["usage"][field] for field in tokens]
