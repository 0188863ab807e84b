"""/v1/chat/completions over a fleet."""

import asyncio

from tests.rigs.rig import StartRig

HELLO = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


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
