"""Memory of the gateway for a large batch, and the longest turn of its event loop while it has it.

    python -m loadtests.studies.gateway_cost.large_replies [--batch 64x8] [--tokens 2048]

One engine of recorded replies, so that all of a batch ends at once: the worst case for memory. The batch is one request
as TRL sends it. A turn is measured in CPU seconds of the loop's thread, so other work on the machine does not count.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp

from engines.process.log_lines import write_log_lines
from engines.types import ReplicaInfo
from gateway.config.schema import Config
from gateway.http.listener import Listener
from loadtests.fleet import named_apart
from loadtests.studies.gateway_cost import canned_engine
from loadtests.studies.gateway_cost.gateway_cpu import TOKEN_IDS, recorded_from, studied_config
from loadtests.studies.gateway_cost.own_process import Served, own_process
from loadtests.workloads import parse_batch

_TICK_S = 0.001
_TIMEOUT_S = 600.0
_PROMPT = list(range(10, 266))


def _run_gateway(config: Config, info: ReplicaInfo, turns: Path, pipe: Connection) -> None:
    """Run a gateway over one engine until the pipe closes; then write its longest turn to a file."""
    write_log_lines(sys.stderr)

    async def discover() -> list[ReplicaInfo]:
        return [info]

    with named_apart(config) as own:
        listener = Listener(own, discover)
        url, longest = listener.start(), [0.0]
        asyncio.run_coroutine_threadsafe(_watch_turns(longest), listener.loop)
        pipe.send(url)
        with contextlib.suppress(EOFError):
            pipe.recv()
        turns.write_text(json.dumps(longest[0]))
        listener.stop()


async def _watch_turns(longest: list[float]) -> None:
    """Keep the largest CPU time between two ticks of the loop."""
    await asyncio.sleep(1.0)  # the gateway's own start
    before = time.thread_time()
    while True:
        await asyncio.sleep(_TICK_S)
        now = time.thread_time()
        longest[0], before = max(longest[0], now - before), now


async def _ask(url: str, batch: str, tokens: int) -> tuple[int, int]:
    """Send one batch; return the bytes of the reply and the tokens in it."""
    prompts, n = parse_batch(batch)
    body = {**TOKEN_IDS, "model": "sim", "prompt": [_PROMPT] * prompts, "n": n, "max_tokens": tokens}
    timeout, size = aiohttp.ClientTimeout(total=_TIMEOUT_S), 0
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{url}/v1/completions", json=body) as reply,
    ):
        reply.raise_for_status()
        async for block in reply.content.iter_any():
            size += len(block)
    return size, prompts * n * tokens


async def _measured(gateway: Served, batch: str, tokens: int) -> None:
    await _ask(gateway.url, "1x8", tokens)  # recorded, and all is loaded
    await asyncio.sleep(2.0)
    before = gateway.resident_mib
    gateway.forget_peak()
    size, made = await _ask(gateway.url, batch, tokens)
    used = gateway.peak_mib - before
    print(f"{made:,} tokens, a reply of {size / 2**20:.0f} MiB: {used:.0f} MiB more at the peak, ", end="")
    print(f"{used / made * 1e6:.0f} MiB a million tokens")


async def _run(batch: str, tokens: int) -> None:
    config = studied_config()
    async with recorded_from(config) as info:
        with contextlib.ExitStack() as stack:
            turns = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "turns.json"
            canned = stack.enter_context(own_process(canned_engine.run, info.url, 0.0))
            ours = dataclasses.replace(info, url=canned.url)
            with own_process(_run_gateway, config, ours, turns) as gateway:
                await _measured(gateway, batch, tokens)
            print(f"longest turn of the event loop: {float(json.loads(turns.read_text())) * 1e3:.0f} ms of CPU")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.studies.gateway_cost.large_replies")
    parser.add_argument("--batch", default="64x8", help="prompts x samples; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="of each sample")
    args = parser.parse_args()
    asyncio.run(_run(args.batch, args.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
