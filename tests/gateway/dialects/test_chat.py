"""/v1/chat/completions over a fleet."""

import asyncio

import pytest

from tests.rigs.rig import Json, Rig, StartRig

HELLO = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


async def test_a_conversation_is_continued_and_says_which_weights_did_it(rig: Rig) -> None:
    status, reply = await rig.post("/v1/chat/completions", HELLO)
    assert status == 200
    choice = reply["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["weight_versions"][0]["version"] == 0


@pytest.mark.parametrize("change", [{"messages": []}, {"messages": None}, {"messages": "hi"}])
async def test_a_conversation_without_messages_is_refused(rig: Rig, change: Json) -> None:
    status, reply = await rig.post("/v1/chat/completions", HELLO | change)
    assert (status, reply["error"]["param"]) == (400, "messages")


async def test_an_images_bytes_are_not_the_length_of_its_prompt(start_rig: StartRig) -> None:
    rig = await start_rig(num_replicas=1)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}, image]}]
    asked = asyncio.create_task(rig.post("/v1/chat/completions", HELLO | {"messages": messages}))
    await rig.begun()
    (replica,) = rig.fleet.replicas
    assert 0 < replica.longest_prompt < 2000
    assert replica.load_tokens < 2000
    rig.hurry()
    assert (await asked)[0] == 200
