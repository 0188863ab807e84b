"""Turns are generated on the path of token ids where an engine renders them, and else as conversations."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.rigs.rig import Json, Rig, StartRig

# The simulated engine answers this with 81 tokens at temperature 0.
HELLO: Any = [{"role": "user", "content": "three"}]
ASKED: Json = {"model": "sim", "max_tokens": 8, "temperature": 0.0, "messages": HELLO}
LONG = 60


async def events(rig: Rig, path: str, body: Json, **headers: str) -> str:
    async with rig.client.post(rig.url + path, json=body | {"stream": True}, headers=headers) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
        return await response.text()


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


async def test_engines_that_do_not_render_are_asked_for_the_chat(rig: Rig) -> None:
    _, rendered = await rig.post("/v1/messages", ASKED)
    for replica in rig.fleet.replicas:
        routes = (route for route in replica.info.capabilities if not route.endswith("render"))
        replica.info = replace(replica.info, capabilities=frozenset(routes))
    status, reply = await rig.post("/v1/messages", ASKED)
    assert (status, reply["content"], reply["usage"]) == (200, rendered["content"], rendered["usage"])
    status, reply = await rig.post("/v1/messages/count_tokens", ASKED)
    assert (status, reply["error"]["type"]) == (404, "not_found_error")


async def test_an_answer_ends_before_its_stop_string(rig: Rig) -> None:
    _, whole = await rig.post("/v1/messages", ASKED)
    text = whole["content"][0]["text"]
    status, reply = await rig.post("/v1/messages", ASKED | {"stop_sequences": [text[3:6]]})
    assert (status, reply["stop_reason"], reply["stop_sequence"]) == (200, "stop_sequence", text[3:6])
    assert reply["content"][0]["text"] == text[:3]
    assert reply["usage"]["output_tokens"] == 6
