"""CPU of one gateway whose engines make tokens at the pace of GPUs.

    python -m loadtests.studies.gateway_cost.paced_fleet [--replicas 64] [--batch 1024] [KEY=VALUE ...]

An engine runs 256 samples at once and makes 20,000 tokens a second: it replays a recorded reply in chunks of 32 tokens,
each at its time. It has a process, and its reader in it. Clients send batches of prompts of 256/1,024 tokens, as many
as fill all engines; they begin one after another, so that batches end at all times. A run takes a minute and a half;
64 replicas need some eight cores.
"""

import argparse
import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import aiohttp

from gateway.config.load import load
from loadtests.fleet import LocalFleet
from loadtests.own_process import Served, own_process
from loadtests.studies.gateway_cost import canned_engine
from loadtests.studies.gateway_cost.gateway_cpu import READER_KEY, SETTINGS, TOKEN_IDS, serve_reader

_CHUNK_TOKENS, _PROMPT_TOKENS, _TOKENS = 32, 256, 1024
_AT_ONCE, _TOKENS_A_SECOND, _BATCHES, _SLACK = 256, 20_000, 2, 5
_STEP_S = _AT_ONCE / _TOKENS_A_SECOND
_BATCH_S = _TOKENS * _STEP_S


@asynccontextmanager
async def _serve_replica(recorded: str) -> AsyncIterator[str]:
    async with canned_engine.serve(recorded, _CHUNK_TOKENS * _STEP_S) as engine, serve_reader(engine) as reader:
        yield reader


async def _run(replicas: int, batch: int, overrides: Sequence[str]) -> str:
    config = load(None, (*SETTINGS, "engine.max_num_seqs=512", *overrides))
    fleet = LocalFleet(config)
    try:
        (info,) = await fleet.start_engines()
        async with AsyncExitStack() as stack:
            starts = (stack.enter_async_context(own_process(_serve_replica, info.url)) for _ in range(replicas))
            readers = await asyncio.gather(*starts)
            infos = [
                dataclasses.replace(info, replica_id=f"engine-{index}", reader=reader.url, reader_key=READER_KEY)
                for index, reader in enumerate(readers)
            ]
            gateway = await stack.enter_async_context(fleet.gateway(config, infos))
            return await measured(gateway, Served("", 0, tuple(reader.pid for reader in readers)), replicas, batch)
    finally:
        await fleet.stop()


async def measured(gateway: Served, engines: Served, replicas: int, batch: int) -> str:
    """Return what the processes use while clients keep all engines busy."""
    clients, done = max(1, replicas * _AT_ONCE // batch), [0]
    timeout = aiohttp.ClientTimeout(total=_SLACK * _BATCH_S)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        asks = [partial(_ask, session, gateway.url, batch, client, done) for client in range(clients)]
        asking = [group.create_task(_ask_on(asks[one], one / clients * _BATCH_S)) for one in range(1, clients)]
        marks = []
        for _ in ("warm", "measured"):
            for _ in range(_BATCHES):  # of the first client, between whose ends the others end as many
                await asks[0]()
            marks.append((time.monotonic(), done[0], gateway.cpu_s, engines.cpu_s))
        for task in asking:
            task.cancel()
    seconds, batches, gateway_s, engines_s = (late - early for early, late in zip(*marks, strict=True))
    tokens = batches * batch * _TOKENS
    pace = tokens / seconds / (replicas * _TOKENS_A_SECOND)
    return (
        f"{replicas} replicas, batches of {batch}: {tokens / seconds:,.0f} tokens/s, {pace:.2f} of the engines' pace\n"
        f"gateway: {gateway_s / seconds:.2f} cores, {gateway_s / max(tokens, 1) * 1e6:.2f} CPU-s a million tokens\n"
        f"engines and readers: {engines_s / seconds:.2f} cores"
    )


async def _ask(session: aiohttp.ClientSession, url: str, batch: int, client: int, done: list[int]) -> None:
    prompt = list(range(10, 10 + _PROMPT_TOKENS))
    body = {**TOKEN_IDS, "model": "sim", "user": f"{client}", "prompt": [prompt] * batch, "max_tokens": _TOKENS}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        await response.read()
    done[0] += 1


async def _ask_on(ask: Callable[[], Awaitable[None]], wait_s: float) -> None:
    await asyncio.sleep(wait_s)
    while True:
        await ask()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.gateway_cost.paced_fleet", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1024, help="prompts of a batch")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the gateway")
    args = parser.parse_args()
    print(asyncio.run(_run(args.replicas, args.batch, args.overrides)))


if __name__ == "__main__":
    main()
