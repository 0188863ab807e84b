"""Many live sessions with long contexts: the gateway's own time a turn, its memory, and the size of the record.

    python -m loadtests.sessions.live [--sessions 1000] [--context 30000] [--think-s 60] [--seconds 120]

Own time is what a client waits for beyond the seconds that the engine needs (`timed_engine.py`), so it has the time of
the client's own loop too. All runs on one machine.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
import psutil

from gateway.config.load import load
from loadtests.fleet import LocalFleet
from loadtests.own_process import own_process
from loadtests.sessions import timed_engine
from loadtests.studies.gateway_cost import reader
from trainer_client import RolloutClient, Sessions

_SETTINGS = ("engine.kind=sim", "engine.num_replicas=1", "engine.max_model_len=1000000", "weights.store=null",
             "gateway.port=0", "engine.sim.decode_step_s=0.002", "engine.sim.decode_step_per_seq_s=0",
             "engine.sim.kv_tokens=1000000000", "engine.sim.prefill_tokens_per_s=100000000")  # fmt: skip
_TIMEOUT_S = 60.0
_ANSWER_TOKENS, _RESULT_LETTERS, _READ = 64, 300, 40


@dataclass
class Measured:
    """Own seconds of turns while all sessions live, and what failed."""

    own_s: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    begun: int = 0
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)
    is_whole: bool = False


async def _session(
    number: int, http: aiohttp.ClientSession, engine: str, args: argparse.Namespace, seen: Measured
) -> None:
    """Live until it is cancelled: a turn, its tool's result, a pause."""
    draw = random.Random(number)
    text = "".join(draw.choices("abcdefghij klmnopqrst\n", k=args.context))
    messages: list[dict[str, str]] = [{"role": "user", "content": text}]
    await asyncio.sleep(number * args.ramp_s / args.sessions)
    for turn in range(1_000_000):
        mark = f"{number}-{turn}"
        messages.append({"role": "user", "content": f"{text[:_RESULT_LETTERS]} turn {mark};"})
        body = orjson.dumps({"model": "sim", "max_tokens": _ANSWER_TOKENS, "messages": messages})
        began = time.perf_counter()
        try:
            async with http.post(f"/sessions/live-{number}/v1/messages", data=body) as response:
                answer, status = await response.read(), response.status
            waited = time.perf_counter() - began
            if status != 200:
                raise aiohttp.ClientError(f"{status} {answer[:100]!r}")
            async with http.get(f"{engine}/spent/{mark}") as response:
                own_s = waited - await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            seen.failed[repr(error)[:120]] += 1
            messages.pop()
        else:
            seen.begun += turn == 0
            if seen.begun == args.sessions:
                seen.all_begun.set()
            if seen.is_whole:
                seen.own_s.append(own_s)
            said = "".join(block.get("text", "") for block in orjson.loads(answer)["content"])
            messages.append({"role": "assistant", "content": said or "-"})
        await asyncio.sleep(draw.expovariate(1 / args.think_s))


async def measured(args: argparse.Namespace) -> dict[str, object]:
    """Run all sessions for `seconds` after the last has begun."""
    seen = Measured()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="live-")))
        config = load(None, [*_SETTINGS, f"gateway.ledger={folder}"])
        fleet = LocalFleet(config)
        stack.push_async_callback(fleet.stop)
        (info,) = await fleet.start_engines()
        engine = stack.enter_context(own_process(timed_engine.serve, info.url)).url
        beside = stack.enter_context(own_process(reader.serve, engine))
        gateway = await stack.enter_async_context(fleet.gateway(config, [reader.read(info, engine, beside)]))
        process = psutil.Process(gateway.pid)
        empty = process.memory_info().rss
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=_TIMEOUT_S)
        http = await stack.enter_async_context(aiohttp.ClientSession(gateway.url, connector=connector, timeout=timeout))
        tasks = [asyncio.create_task(_session(n, http, engine, args, seen)) for n in range(args.sessions)]
        await seen.all_begun.wait()
        seen.is_whole, began, cpu = True, time.monotonic(), sum(process.cpu_times()[:2])
        await asyncio.sleep(args.seconds)
        seconds, cpu = time.monotonic() - began, sum(process.cpu_times()[:2]) - cpu
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        rss = process.memory_info().rss
        client = await stack.enter_async_context(RolloutClient(gateway.url))
        raw = await _raw_bytes(Sessions(client), args.sessions)
        kept = bytes_in(folder)
        at = statistics.quantiles(seen.own_s, n=1000)
        return {
            "sessions, letters of context": f"{args.sessions}, {args.context}",
            "turns measured, a second": f"{len(seen.own_s)}, {len(seen.own_s) / seconds:.1f}",
            "own time, ms: median, p90, p99": ", ".join(f"{1000 * at[place]:.1f}" for place in (499, 899, 989)),
            "gateway's CPU, of one core": f"{cpu / seconds:.2f}",
            "gateway's memory, MB: before, after": f"{empty / 1e6:.0f}, {rss / 1e6:.0f}",
            "record, MB; of raw ids and log-probs": f"{kept / 1e6:.0f}; {kept / raw:.2f}",
            "failed": dict(seen.failed),
        }


async def _raw_bytes(sessions: Sessions, count: int) -> float:
    """Return the bytes of all ids and log-probs, from those of some sessions."""
    some = [await sessions.read(f"live-{number}") for number in range(0, count, max(1, count // _READ))]
    each = [4 * len(call.prompt_token_ids) + 8 * len(call.token_ids) for one in some for call in one.calls]
    return sum(each) / len(some) * count


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.sessions.live", description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--context", type=int, default=30_000, help="letters, which are tokens of the simulated engine")
    parser.add_argument("--think-s", type=float, default=60.0, help="mean seconds between two turns of a session")
    parser.add_argument("--ramp-s", type=float, default=100.0, help="seconds in which the sessions begin")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds to measure once all live")
    found = asyncio.run(measured(parser.parse_args(argv)))
    for name, value in found.items():
        print(f"{name:<40} {value}")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
