"""A gateway that is killed and started again on its port costs the client no rollout."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engines.config import SimConfig
from engines.process.port import free_port
from tests.rigs.forked_gateway import ForkedGateway
from tests.rigs.rig import SimReplica
from trainer_client import RolloutClient, SamplingParams

NUM_PROMPTS = 12
SAMPLING = SamplingParams(n=2, max_tokens=60, ignore_eos=True)


@pytest.fixture
async def engine() -> AsyncIterator[SimReplica]:
    replica = await SimReplica("engine-0", 0, SimConfig(decode_step_s=0.0, decode_step_per_seq_s=0.0)).start()
    yield replica
    await replica.kill()


async def test_a_batch_survives_a_gateway_that_is_killed_under_it(engine: SimReplica, tmp_path: Path) -> None:
    port = free_port()
    gateway = ForkedGateway(port, engine.info.url, tmp_path / "log")
    await asyncio.to_thread(gateway.start)
    try:
        async with RolloutClient(f"http://127.0.0.1:{port}") as client:
            await client.wait_ready(timeout_s=60)
            engine.scheduler.stall(after=20)
            batch = client.generate([[5, 6, number + 7] for number in range(NUM_PROMPTS)], SAMPLING)
            async with asyncio.timeout(60):
                while not engine.scheduler.stalled:
                    await asyncio.sleep(0.01)
            gateway.kill()
            engine.hurry()
            await asyncio.to_thread(gateway.start)
            async with asyncio.timeout(120):
                rollouts = await batch.gather()
    finally:
        gateway.kill()
    assert [rollout.prompt_index for rollout in rollouts] == list(range(NUM_PROMPTS))
    for rollout in rollouts:
        assert [len(completion.token_ids) for completion in rollout.completions] == [60, 60]
