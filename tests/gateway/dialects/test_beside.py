"""Rollouts whose engines are read beside them, as behind Serve: the same as those that the gateway reads."""

import asyncio
from typing import Any

import pytest

from tests.rigs.rig import Rig, StartRig

Json = dict[str, Any]

LENGTH = 80
SLOW: Json = {"decode_step_s": 0.02}
COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
GREEDY: Json = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
BODY: Json = GREEDY | {"model": "sim", "prompt": [5, 6], "logprobs": 0, "return_token_ids": True}
VARYING = ("id", "created", "request_id")


async def told(rig: Rig, path: str, body: Json) -> Json:
    status, reply = await rig.post(path, body)
    assert status == 200, reply
    return {key: value for key, value in reply.items() if key not in VARYING}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, BODY),
        (COMPLETIONS, BODY | {"prompt": [[5, 6], [7]], "n": 4, "temperature": 1.0, "seed": 3}),
        (COMPLETIONS, BODY | {"max_tokens": 3, "logprobs": 2}),
        (CHAT, GREEDY | {"messages": [{"role": "user", "content": "hello"}], "logprobs": True}),
        (TOKENS, {"token_ids": [5, 6], "sampling_params": GREEDY | {"logprobs": 0}}),
    ],
)
async def test_a_reply_is_the_same(start_rig: StartRig, path: str, body: Json) -> None:
    here, beside = await start_rig(1, has_readers=False), await start_rig(1)
    assert await told(beside, path, body) == await told(here, path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, BODY), (CHAT, GREEDY | {"messages": [{"role": "user", "content": "hello"}]})],
)
async def test_a_stream_has_the_same_chunks(start_rig: StartRig, path: str, body: Json) -> None:
    streams = []
    for rig in (await start_rig(1, has_readers=False), await start_rig(1)):
        chunks = await rig.stream(path, body)
        streams.append([{key: value for key, value in chunk.items() if key not in VARYING} for chunk in chunks])
    assert streams[0] == streams[1]


async def test_a_refusal_has_the_engines_own_words(start_rig: StartRig) -> None:
    bad = BODY | {"stop": [5]}
    here, beside = await start_rig(1, has_readers=False), await start_rig(1)
    assert await beside.post(COMPLETIONS, bad) == await here.post(COMPLETIONS, bad)


async def test_a_request_whose_client_leaves_ends_at_its_engine(start_rig: StartRig) -> None:
    rig = await start_rig(1, sim=SLOW)
    running = asyncio.create_task(told(rig, COMPLETIONS, BODY))
    await rig.begun()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(20):
        while rig.replicas[0].scheduler.stalled:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_sample_whose_reader_ends_with_its_replicas_process_goes_on_elsewhere(
    start_rig: StartRig, is_stream: bool
) -> None:
    rig = await start_rig(2, sim=SLOW)
    asking: Any = rig.stream(COMPLETIONS, BODY) if is_stream else told(rig, COMPLETIONS, BODY)
    running = asyncio.create_task(asking)
    await rig.begun()
    (busy,) = [replica for replica in rig.replicas if replica.scheduler.stalled]
    await rig.readers[busy.info.replica_id].close()
    rig.hurry()
    reply = await running
    chunks = reply if is_stream else [reply]
    assert sum(len(choice["token_ids"] or ()) for chunk in chunks for choice in chunk["choices"]) == LENGTH
    (other,) = [replica for replica in rig.replicas if replica is not busy]
    assert 0 < other.generated_tokens < LENGTH
