"""TRL trains on sessions of an agent while a replica and the gateway are killed: two vLLM replicas, many steps."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")

from engines.process.port import free_port
from examples.tiny_model import task
from gateway.config.schema import Config
from loadtests.chaos.process_fleet import ProcessFleet, healthy_within, running
from tests.rigs.engines.real_vllm import engine_config
from tests.rigs.sorting import rise
from tests.running.client_records import runs_client, vllm_replicas

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STEPS, KILL_ENGINE_AT, KILL_GATEWAY_AT = 24, 4, 8
RISE, CLOSE = 0.15, 1e-6
UP_S = 300.0


@runs_client(
    "TRL GRPOTrainer, agent", "trl", ran="an agent with a tool; deaths in the middle", against=vllm_replicas(2)
)
async def test_the_reward_rises_by_sessions_while_a_replica_and_the_gateway_are_killed(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    engine = engine_config(task.COMMITTED, tmp_path).model_copy(update={"num_replicas": 2})
    gateway = {"port": free_port(), "ledger": str(tmp_path / "ledger")}
    config = Config.model_validate({"engine": engine, "gateway": gateway})
    fleet = ProcessFleet(config, tmp_path)
    async with running(fleet):
        await healthy_within(fleet.url, UP_S)
        steps = await trained(fleet, tmp_path)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert fleet.deaths == 2
    assert rise(steps) > RISE
    assert all(abs(step["importance_ratio"] - 1) <= CLOSE for step in steps)
    record_property("fact", f"reward {rise(steps):+.2f} over {STEPS} steps, a replica and the gateway killed -9")


async def trained(fleet: ProcessFleet, folder: Path) -> list[dict[str, Any]]:
    """The trainer's reports of its steps."""
    asked = ["--url", fleet.url, "--out", str(folder / "model"), "--steps", str(STEPS), "--agent"]
    with (folder / "trainer.log").open("w") as log:
        trainer = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "examples.train_sort", *asked, stdout=asyncio.subprocess.PIPE, stderr=log
        )
        steps: list[dict[str, Any]] = []
        assert trainer.stdout is not None
        async for line in trainer.stdout:
            if line.startswith(b'{"step"'):
                steps.append(json.loads(line))
                await asyncio.sleep(0.5)  # the next sync is over, and agents work
                if steps[-1]["step"] == KILL_ENGINE_AT:
                    await fleet.kill(1)
                if steps[-1]["step"] == KILL_GATEWAY_AT:
                    fleet.kill_gateway()
        assert await trainer.wait() == 0, (folder / "trainer.log").read_text()[-2000:]
    return steps
