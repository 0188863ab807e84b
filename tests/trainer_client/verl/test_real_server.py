"""verl's client that resumes aborted rollouts, and verl's order of a weight sync, against real vLLM replicas on CPU."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
from transformers import AutoModelForCausalLM

from tests.rigs.verl_run import ROOT, RealFleet, fleet
from tests.trainer_client.verl.test_llm_client import ENDLESS
from tests.trainer_client.verl.test_server import client_of
from trainer_client.verl.actor import GatewayServer
from trainer_client.verl.checkpoint_engine import GatewayCheckpointEngine
from trainer_client.verl.settings import Settings

pytestmark = pytest.mark.verl

MODEL = ROOT / "examples" / "tiny_model" / "digit-sort"
PROMPTS = [[4, 5, number] for number in range(4, 12)]
LENGTH = 400


class Sync:
    """The order of verl's checkpoint manager: stop the server, send, report the step, resume."""

    def __init__(self, server: GatewayServer, sender: GatewayCheckpointEngine) -> None:
        self._server = server
        self._sender = sender

    async def run(self, model: Any, global_steps: int) -> None:
        await self._server.abort_all_requests()
        await self._server.update_weights(global_steps)
        await asyncio.to_thread(
            lambda: asyncio.run(self._sender.send_weights(iter(model.state_dict().items()), global_steps))
        )
        await self._server.execute_checkpoint_engine("finalize")
        await self._server.resume_generation()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[RealFleet, GatewayServer]]:
    with fleet(tmp_path) as served:
        rollout = SimpleNamespace(prompt_length=16, response_length=LENGTH)
        started = GatewayServer(Settings(url=served.url, abort_at_sync=True), rollout, is_first=True)
        await started.start()
        yield served, started
        await started.close()


async def test_rollouts_that_a_sync_cut_short_are_resumed_and_told_as_of_both_steps(
    server: tuple[RealFleet, GatewayServer],
) -> None:
    served, asked = server
    sender = GatewayCheckpointEngine(bucket_size=1 << 20, is_master=True, url=served.url)
    sync, model = Sync(asked, sender), AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    client = client_of(asked)
    await sync.run(model, 0)
    sampling = {**ENDLESS, "max_tokens": LENGTH}
    served.stand_still()
    asking = [
        asyncio.create_task(client.generate("r", prompt_ids=prompt, sampling_params=sampling)) for prompt in PROMPTS
    ]
    await asyncio.to_thread(served.until_in_flight, len(PROMPTS))
    await asyncio.to_thread(served.go_on_to, 20)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    await sync.run(model, 1)
    outputs = await asyncio.gather(*asking)
    sender.close()
    assert [len(output.token_ids) for output in outputs] == [LENGTH] * len(PROMPTS)
    assert [len(output.log_probs) for output in outputs] == [LENGTH] * len(PROMPTS)
    told = [(output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) for output in outputs]
    assert told == [(0, 1)] * len(PROMPTS)
    assert served.ask("/weight_info")["weight_version"] == "2"
