"""4,096 slow requests at once on two replicas and a busy machine: all right, and no healthy replica is suspected."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from engines.config import SimConfig
from gateway.http.door import raise_limit
from loadtests.chaos.clients.contents import Asked, Delivered, flaw
from loadtests.chaos.faults import until
from loadtests.chaos.processes.process_fleet import ProcessFleet, fleet_config
from sim.model import SimModel

pytestmark = [pytest.mark.load, pytest.mark.slow]

REQUESTS, TOKENS, REPLICAS = 4096, 16, 2
SIM = SimConfig(decode_step_s=0.3)  # 5 s a request
_TOGETHER = 64
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
    try:
        await fleet.start()
        await until(lambda: serves(fleet), 120, "the fleet to come up")
        made_before = await fleet.made()
        with busy_machine():
            await all_come_right(fleet)
        assert await states(fleet) == ["SERVING"] * REPLICAS
        assert [event for event in (await status(fleet))["events"] if "SUSPECT" in event["text"]] == []
        assert await fleet.made() - made_before == REQUESTS * TOKENS  # none was made twice
    finally:
        await fleet.stop()


async def all_come_right(fleet: ProcessFleet) -> None:
    model, prompts = SimModel.of(SIM), [[3 + place % 900, 3 + place // 900, 9] for place in range(REQUESTS)]
    timeout = aiohttp.ClientTimeout(total=BOUND_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        asked = []
        for prompt in prompts:
            asked.append(asyncio.create_task(completion(session, fleet.url, prompt)))
            if len(asked) % _TOGETHER == 0:
                await asyncio.sleep(0.01)  # a client that connects 4,096 times first would send its heads too late
        replies = await asyncio.gather(*asked)
    for prompt, got in zip(prompts, replies, strict=True):
        assert flaw(model, Asked(prompt, TOKENS, 0, is_greedy=True), got) is None


async def completion(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> Delivered:
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with session.post(f"{url}/v1/completions", json={"prompt": [prompt], **sampling}) as response:
        assert response.status == 200, await response.text()
        (choice,) = (await response.json())["choices"]
    spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
    return Delivered(choice["token_ids"], spans, text=choice["text"])


async def serves(fleet: ProcessFleet) -> bool:
    try:
        return await states(fleet) == ["SERVING"] * REPLICAS
    except aiohttp.ClientError:
        return False


async def states(fleet: ProcessFleet) -> list[str]:
    return [replica["state"] for replica in (await status(fleet))["replicas"]]


async def status(fleet: ProcessFleet) -> dict[str, list[dict[str, str]]]:
    async with aiohttp.ClientSession() as session, session.get(fleet.url + "/status") as response:
        found: dict[str, list[dict[str, str]]] = await response.json()
        return found
