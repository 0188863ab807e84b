"""The simulated engine over HTTP: vLLM's replies and refusals, and its behaviour in time and across weight updates."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from engines.config import SimConfig
from sim.dialect import Limits
from sim.model import SimModel, seeded_draw
from sim.scheduler import SimScheduler
from sim.server import SimServer
from tests.rigs.waiting import wait_until

Json = dict[str, Any]

FAST = SimConfig(decode_step_s=0, decode_step_per_seq_s=0, prefill_tokens_per_s=1e9)
SLOW = SimConfig(decode_step_s=0.005)
MODEL = SimModel.of(FAST)
PROMPT = [5, 6, 7]
INIT = {"init_info": {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}}
UPDATE = {"update_info": {"names": ["weight"], "dtype_names": ["bfloat16"], "shapes": [[4, 4]]}}


class Engine:
    """A running simulated engine and a client of it."""

    def __init__(self, client: TestClient[web.Request, web.Application], scheduler: SimScheduler) -> None:
        self.client = client
        self.scheduler = scheduler

    async def ask(self, path: str, body: Json | None = None, *, status: int = 200, method: str = "POST") -> Any:
        async with self.client.request(method, path, json=body) as reply:
            assert reply.status == status, await reply.text()
            return json.loads(await reply.read())

    async def see(self, path: str) -> Any:
        return await self.ask(path, method="GET")

    async def complete(self, **body: Any) -> list[Json]:
        reply = await self.ask("/v1/completions", {"prompt": PROMPT, "return_token_ids": True} | body)
        return list(reply["choices"])

    async def metric(self, name: str) -> float:
        async with self.client.get("/metrics") as reply:
            lines = (await reply.text()).splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    async def until(self, name: str, is_reached: Callable[[float], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_reached(await self.metric(name)):
                pass

    async def update(self, **finish: str) -> None:
        await self.ask("/start_weight_update")
        await self.ask("/update_weights", UPDATE)
        await self.ask("/finish_weight_update", dict(finish))


@asynccontextmanager
async def engine(
    sim: SimConfig = FAST, *, seed: int = 0, max_model_len: int = 4096, max_num_seqs: int = 64, stream_interval: int = 1
) -> AsyncIterator[Engine]:
    limits = Limits(max_model_len=max_model_len, seed=seed, stream_interval=stream_interval, shows_cached_tokens=True)
    sim_server = SimServer("m", sim, limits, max_num_seqs=max_num_seqs, world_size=2)
    server = TestServer(sim_server.app())
    await server.start_server(shutdown_timeout=0.1)
    async with TestClient(server) as client:
        yield Engine(client, sim_server.scheduler)


def in_background(coroutine: Coroutine[Any, Any, list[Json]]) -> "asyncio.Task[list[Json]]":
    return asyncio.create_task(coroutine)


async def test_without_a_seed_samples_differ_within_a_server_and_repeat_on_its_twin() -> None:
    async with engine() as one, engine() as twin, engine(seed=1) as other:
        texts = [[choice["text"] for choice in await replica.complete(n=4)] for replica in (one, twin, other, one)]
    assert texts[0] == texts[1]
    assert len({text for group in (texts[0], texts[2], texts[3]) for text in group}) == 12


async def test_weight_calls_out_of_order_fail() -> None:
    async with engine() as replica:
        await replica.ask("/finish_weight_update", {}, status=500)
        await replica.ask("/update_weights", UPDATE, status=500)
        await replica.ask("/start_weight_update")
        await replica.ask("/start_weight_update", status=500)
        await replica.ask("/update_weights", UPDATE, status=500)  # before init; ends the update
        await replica.ask("/finish_weight_update", {}, status=500)
        await replica.ask("/init_weight_transfer_engine", {}, status=400)
        assert await replica.see("/weight_info") == {"weight_version": "default"}


async def test_a_completion_kept_across_an_update_has_a_span_of_each_version() -> None:
    async with engine(SLOW) as replica:
        await replica.ask("/init_weight_transfer_engine", INIT)
        replica.scheduler.stall(after=4)
        running = in_background(replica.complete(temperature=0, max_tokens=60, ignore_eos=True))
        await replica.until("generation_tokens_total", lambda count: count == 4)
        await replica.ask("/pause?mode=keep&clear_cache=false")
        replica.scheduler.go_on()
        assert await replica.see("/is_paused") == {"is_paused": True}
        assert await replica.ask("/reset_prefix_cache") == {"success": False}
        await replica.update(weight_version="7")
        await asyncio.sleep(0.02)
        assert await replica.metric("generation_tokens_total") == 4
        await replica.ask("/resume")
        (choice,) = await running
    assert choice["weight_versions"] == [
        {"version": "default", "start": 0, "end": 4},
        {"version": "7", "start": 4, "end": 60},
    ]
    versions = ["default"] * 4 + ["7"] * 56
    assert choice["token_ids"] == MODEL.complete(PROMPT, versions=versions, max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize(("max_num_seqs", "kv_tokens"), [(3, 4096), (64, 30)])
async def test_what_does_not_fit_waits_and_is_served_in_the_end(max_num_seqs: int, kv_tokens: int) -> None:
    sim = SLOW.model_copy(update={"kv_tokens": kv_tokens})
    async with engine(sim, max_num_seqs=max_num_seqs, max_model_len=30) as replica:
        replica.scheduler.stall(after=10)
        running = in_background(replica.complete(n=6, seed=1, max_tokens=16, ignore_eos=True))
        await replica.until("num_requests_waiting", lambda count: count >= 3)
        assert await replica.metric("kv_cache_usage_perc") <= 1
        replica.scheduler.go_on()
        choices = await running
    for i, choice in enumerate(choices):
        assert choice["token_ids"] == MODEL.complete(PROMPT, draw=seeded_draw(1, i), max_tokens=16, ignore_eos=True)


def test_the_process_ends_on_sigterm_whatever_it_is_doing() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sim.server", "--port", str(port), "--sim", '{"decode_step_s": 0.01}']
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: _connects(port), 30)
        with socket.create_connection(("127.0.0.1", port)) as client:
            body = b'{"prompt": [5], "max_tokens": 4000, "ignore_eos": true}'
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0  # the request would take forty seconds
    finally:
        process.kill()
        process.wait()


def _connects(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
