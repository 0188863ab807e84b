"""TRL's own client, whose connection breaks under a batch: it sends the batch again and gets the one that runs."""

import asyncio
from functools import partial

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

from trl.generation.vllm_client import VLLMClient

from tests.gateway.dialects.replays.test_replays import LENGTH, made, until
from tests.rigs.rig import Rig

PROMPTS = [[5, 6, number + 7] for number in range(4)]


async def test_trls_client_adopts_its_batch(rig: Rig) -> None:
    client = await asyncio.to_thread(VLLMClient, rig.url, connection_timeout=20.0)
    generate = partial(client.generate, PROMPTS, n=2, max_tokens=LENGTH, generation_kwargs={"ignore_eos": True})
    asking = asyncio.create_task(asyncio.to_thread(generate))
    await rig.begun(samples=8)
    rig.break_connections()
    await until(rig, "orphaned_batch_ends", 1, end="adopted")
    rig.hurry()
    reply = await asking
    assert [len(token_ids) for token_ids in reply["completion_ids"]] == [LENGTH] * 8
    assert reply["prompt_ids"] == PROMPTS
    assert made(rig) == 8 * LENGTH
