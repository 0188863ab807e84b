"""4,096 slow requests at once on two replicas and a busy machine: all right, and no healthy replica is suspected."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from engines.config import SimConfig
from engines.sim.model import SimModel
from gateway.http.descriptors import raise_limit
from loadtests.chaos.contents import Asked, Delivered, flaw
from loadtests.chaos.faults import until
from loadtests.chaos.process_fleet import ProcessFleet, fleet_config
from trainer_client import RolloutClient, SamplingParams

pytestmark = [pytest.mark.load, pytest.mark.slow]

REQUESTS, TOKENS, BOUND_S = 4096, 32, 400.0
SIM = SimConfig(decode_step_s=0.04)


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


async def test_thousands_of_slow_requests_all_end_and_suspect_nobody(tmp_path: Path) -> None:
    raise_limit()
    fleet = ProcessFleet(fleet_config("many", 2, SIM, tmp_path), tmp_path)
    try:
        await fleet.start()
        await until(lambda: serves(fleet), 120, "the fleet to come up")
        with busy_machine():
            await all_come_right(fleet)
        events = (await status(fleet))["events"]
        assert not [event for event in events if "SUSPECT" in str(event) or "LOST" in str(event)]
        assert await serves(fleet)
    finally:
        await fleet.stop()


async def all_come_right(fleet: ProcessFleet) -> None:
    model, prompts = SimModel.of(SIM), [[3 + place % 900, 3 + place // 900, 9] for place in range(REQUESTS)]
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    async with RolloutClient(fleet.url, max_in_flight=REQUESTS, attempts=1) as client:
        rollouts = await client.generate(prompts, sampling, timeout_s=BOUND_S).gather()
    assert len(rollouts) == REQUESTS
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        (completion,) = rollout.completions
        spans = [(span.version, span.start, span.end) for span in completion.spans]
        got = Delivered(completion.token_ids.tolist(), spans, text=completion.text)
        assert flaw(model, Asked(prompt, TOKENS, 0, is_greedy=True), got) is None
        assert rollout.attempts == 1


async def serves(fleet: ProcessFleet) -> bool:
    try:
        found = [replica["state"] for replica in (await status(fleet))["replicas"]]
    except aiohttp.ClientError:
        return False
    return found == ["SERVING", "SERVING"]


async def status(fleet: ProcessFleet) -> dict[str, list[dict[str, object]]]:
    async with aiohttp.ClientSession() as session, session.get(fleet.url + "/status") as response:
        found: dict[str, list[dict[str, object]]] = await response.json()
        return found
