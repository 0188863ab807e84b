"""CPU of the gateway for each kind of request, beside a pass-through of aiohttp and routers, on recorded replies.

    python -m loadtests.studies.gateway_cost.gateway_cpu [--rounds 7] [--rows "single 64/64"] [--vllm-router COMMAND]

One engine of recorded replies, which a simulated engine has made in chunks of 32 tokens, log-probabilities on. The
servers between take turns, request for request the same load; the figure is CPU time of the server's process, the
median of the rounds, so other work on the machine matters little.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from engines.clients.vllm_engine import VllmEngine
from engines.reading.server import ReaderServer
from gateway.config.load import load
from loadtests.fleet import LocalFleet
from loadtests.own_process import Served, own_process
from loadtests.studies.gateway_cost import canned_engine, pass_through
from loadtests.studies.ratios import pair_ratios
from loadtests.studies.routers import running_router

_TOKENS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_TIMEOUT_S = 300.0
READER_KEY = "of this study"
_SAMPLING = {"temperature": 1.0, "ignore_eos": True}
SETTINGS = (
    "engine.kind=sim", "engine.num_replicas=1", "weights.store=null", "gateway.port=0",
    "engine.sim.decode_step_s=0.0005", "engine.sim.decode_step_per_seq_s=0",
)  # fmt: skip
TOKEN_IDS = {**_SAMPLING, "logprobs": 0, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of request: `requests` of it are a round, `at_once` of them in flight."""

    name: str
    path: str
    body: Mapping[str, object]
    requests: int
    at_once: int


def _prompt(tokens: int) -> list[int]:
    return list(range(10, 10 + tokens))


def _completion(prompt_tokens: int, max_tokens: int, **more: object) -> Mapping[str, object]:
    return {**TOKEN_IDS, "prompt": _prompt(prompt_tokens), "max_tokens": max_tokens, **more}


def _conversation(**more: object) -> Mapping[str, object]:
    words = " ".join(f"word{number}" for number in range(40))
    return {**_SAMPLING, "messages": [{"role": "user", "content": words}], "max_tokens": 64, "logprobs": True, **more}


ROWS = (
    Row("single 64/64", _TOKENS, _completion(64, 64), 400, 16),
    Row("single 256/256", _TOKENS, _completion(256, 256), 400, 16),
    Row("single 1k/4k", _TOKENS, _completion(1024, 4096), 60, 8),
    Row("group n=8, 256/256", _TOKENS, _completion(256, 256, n=8), 60, 8),
    Row("TRL batch 64x8, 256/256", _TOKENS, _completion(256, 256, n=8, prompt=[_prompt(256)] * 64), 2, 1),
    Row("stream, chunks of 32", _TOKENS, _completion(256, 256, stream=True), 300, 16),
    Row("chat 64", _CHAT, _conversation(), 400, 16),
    Row("chat 64, streamed", _CHAT, _conversation(stream=True), 300, 16),
)


async def _seconds_a_request(session: aiohttp.ClientSession, server: Served, row: Row) -> float:
    """Return the CPU seconds of the server for each request of one round."""
    left, before = iter(range(row.requests)), server.cpu_s

    async def caller() -> None:
        for number in left:  # no client has equal batches under way, of which each waits for a moment
            body = {"model": "sim", "user": f"{number}", **row.body}
            async with session.post(server.url + row.path, json=body) as response:
                async for _ in response.content.iter_any():
                    pass
                if response.status != 200:
                    raise RuntimeError(f"{response.url} answered {response.status}")

    await asyncio.gather(*(caller() for _ in range(row.at_once)))
    return (server.cpu_s - before) / row.requests


Costs = dict[str, dict[str, list[float]]]
"""CPU seconds a request of each round, by row and server."""


async def measured(servers: Mapping[str, Served], rows: Sequence[Row], rounds: int) -> Costs:
    """Measure all rows on all servers in alternating order; a first round without record warms all up."""
    costs: Costs = {row.name: {name: [] for name in servers} for row in rows}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        for row in rows:
            for number in range(rounds + 1):
                for name in servers if number % 2 else reversed(list(servers)):
                    seconds = await _seconds_a_request(session, servers[name], row)
                    if number:
                        costs[row.name][name].append(seconds)
    return costs


def table(costs: Costs) -> str:
    """Return microseconds a request, and the ratio of the gateway to each other server, as a table of Markdown."""
    others = [name for name in next(iter(costs.values())) if name != "gateway"]
    head = ["case", "gateway, us a request", *(f"{name}, us" for name in others), *(f"/ {name}" for name in others)]
    lines = [head, ["---"] * len(head)]
    for row, by_server in costs.items():
        medians = [statistics.median(by_server[name]) * 1e6 for name in ("gateway", *others)]
        ratios = [statistics.median(pair_ratios(by_server["gateway"], by_server[name])) for name in others]
        lines.append([row, *(f"{median:,.0f}" for median in medians), *(f"{ratio:.2f}" for ratio in ratios)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@contextlib.asynccontextmanager
async def serve_reader(engine: str) -> AsyncIterator[str]:
    """Read beside an engine, as its Serve replica does."""
    server = ReaderServer(VllmEngine("engine-0", engine), READER_KEY)
    yield await server.open("127.0.0.1")
    await server.close()


async def _run(args: argparse.Namespace) -> Costs:
    config = load(None, SETTINGS)
    fleet = LocalFleet(config)
    try:
        (info,) = await fleet.start_engines()
        async with contextlib.AsyncExitStack() as stack:
            canned = await stack.enter_async_context(own_process(canned_engine.serve, info.url))
            beside = await stack.enter_async_context(own_process(serve_reader, canned.url))
            read = dataclasses.replace(info, url=canned.url, reader=beside.url, reader_key=READER_KEY)
            gateway = await stack.enter_async_context(fleet.gateway(config, [read]))
            servers = {
                "gateway": Served(gateway.url, gateway.pid),
                "gateway and reader": Served(gateway.url, gateway.pid, (beside.pid,)),
                "pass-through": await stack.enter_async_context(own_process(pass_through.serve, canned.url)),
            }
            if args.vllm_router:
                servers["vllm-router"] = Served(*stack.enter_context(running_router(args.vllm_router, [canned.url])))
            rows = [row for row in ROWS if not args.rows or row.name in args.rows]
            return await measured(servers, rows, args.rounds)
    finally:
        await fleet.stop()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.gateway_cost.gateway_cpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", nargs="*", choices=[row.name for row in ROWS], help="default: all")
    parser.add_argument("--vllm-router", default=os.environ.get("VLLM_ROUTER"), help="its command")
    parser.add_argument("--json", type=Path, help="file for all rounds")
    args = parser.parse_args()
    costs = asyncio.run(_run(args))
    print(table(costs))
    if args.json:
        args.json.write_bytes(orjson.dumps(costs, option=orjson.OPT_INDENT_2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
