"""4,096 slow requests at once on two replicas and a busy machine: all right, and no healthy replica is suspected."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.config import SimConfig
from gateway.http.listener import raise_limit
from loadtests.chaos.clients.contents import Asked, Delivered, flaw
from loadtests.chaos.process_fleet import ProcessFleet, fleet_config, running
from sim.model import SimModel
from trainer_client import RolloutClient, SamplingParams

pytestmark = [pytest.mark.load, pytest.mark.slow]

REQUESTS, TOKENS, REPLICAS = 4096, 16, 2
SIM = SimConfig(decode_step_s=0.3)  # 5 s a request
BOUND_S = 600.0  # a hang; it takes 25 s where nothing else runs


@contextmanager
def busy_machine(processes: int = 2) -> Iterator[None]:
    """Programs that take all the time of two cores."""
    running = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(processes)]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.join()


def _spin() -> None:
    while True:
        pass


async def test_thousands_of_slow_requests_at_once_all_end_and_suspect_nobody(tmp_path: Path) -> None:
    raise_limit()
    config = fleet_config("many", REPLICAS, SIM, tmp_path)
    engine = config.engine.model_copy(update={"max_num_seqs": REQUESTS // REPLICAS})  # all of them run at once
    fleet = ProcessFleet(config.model_copy(update={"engine": engine}), tmp_path)
    async with running(fleet), RolloutClient(fleet.url, max_in_flight=REQUESTS) as client:
        await client.wait_ready(120)
        made_before = await fleet.made()
        with busy_machine():
            await all_come_right(client)
        status = await client.status()
        assert [replica["state"] for replica in status["replicas"]] == ["SERVING"] * REPLICAS
        assert [event for event in status["events"] if "SUSPECT" in event["text"]] == []
        assert await fleet.made() - made_before == REQUESTS * TOKENS  # none was made twice


async def all_come_right(client: RolloutClient) -> None:
    model, prompts = SimModel.of(SIM), [[3 + place % 900, 3 + place // 900, 9] for place in range(REQUESTS)]
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=False)
    for rollout in await client.generate(prompts, greedy, timeout_s=BOUND_S).gather():
        (completion,) = rollout.completions
        asked = Asked(prompts[rollout.prompt_index], TOKENS, 0, is_greedy=True)
        assert flaw(model, asked, Delivered.of_completion(completion)) is None
