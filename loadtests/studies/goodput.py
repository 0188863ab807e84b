"""Tokens a second that streams get while engines are hurt again and again, beside the same undisturbed.

    python -m loadtests.studies.goodput --url http://127.0.0.1:8100 --streams 256 --every-s 30 --seconds 300

The fleet was started on this machine by `rollout-gateway up`. Undisturbed seconds come before and after. Replicas are
hurt in turn; one that does not serve at its turn is left out. Exits with 1 if a stream failed or has another length.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Sequence

import aiohttp

from loadtests.studies.lost_replica import Stream

_TIMEOUT_S = 300.0


async def ask_on(session: aiohttp.ClientSession, streams: list[Stream], caller: int, args: argparse.Namespace) -> None:
    """Run one stream after another, until cancelled, and append each to `streams`."""
    drawn = random.Random(caller)
    body = {"max_tokens": args.tokens, "ignore_eos": True, "return_token_ids": True, "stream": True}
    for turn in itertools.count():
        streams.append(Stream(f"goodput-{os.getpid()}-{caller}-{turn}"))
        prompt = [drawn.randrange(3, args.vocabulary) for _ in range(args.prompt_tokens)]
        await streams[-1].run(session, args.url, body | {"prompt": [prompt]})


async def hurt(session: aiohttp.ClientSession, turn: int, args: argparse.Namespace) -> bool:
    """Send the signal to a replica's engine; return False where it does not serve."""
    async with session.get(args.url + "/status") as reply:
        replicas = sorted((await reply.json())["replicas"], key=lambda one: str(one["replica_id"]))
    one = replicas[turn % len(replicas)]
    if one["state"] != "SERVING":
        return False
    os.kill(one["pid"], signal.Signals[f"SIG{args.signal}"])
    return True


def made_between(streams: Sequence[Stream], begin: float, end: float) -> int:
    return sum(tokens for one in streams for at, tokens in one.arrivals if begin < at <= end)


async def study(args: argparse.Namespace) -> int:
    streams: list[Stream] = []
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        callers = [asyncio.create_task(ask_on(session, streams, number, args)) for number in range(args.streams)]
        await asyncio.sleep(args.warm_s)
        times = [time.monotonic()]
        await asyncio.sleep(args.quiet_s)
        times.append(time.monotonic())
        hurts = 0
        for turn in range(int(args.seconds / args.every_s)):
            hurts += await hurt(session, turn, args)
            await asyncio.sleep(args.every_s)
        times.append(time.monotonic())
        await asyncio.sleep(args.quiet_s)
        times.append(time.monotonic())
        for task in callers:
            task.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    rates = [made_between(streams, begin, end) / (end - begin) for begin, end in itertools.pairwise(times)]
    undisturbed = (rates[0] + rates[2]) / 2
    done = [one for one in streams if one.error or one.tokens >= args.tokens]
    failed = [one for one in done if one.error or one.tokens != args.tokens]
    shown = ", ".join(f"{rate:.0f}" for rate in rates)
    print(f"tokens/s before, during and after: {shown}; {hurts} engines hurt; goodput {rates[1] / undisturbed:.3f}")
    moved, stayed = (
        max((one.longest_gap_s(times[1]) for one in done if one.has_moved is moves), default=0.0)
        for moves in (True, False)
    )
    print(f"longest gap of a stream that moved {moved:.2f} s, of one that stayed {stayed:.2f} s")
    print(f"{len(done)} streams ended, {len(failed)} failed or of another length", *(one.error for one in failed[:3]))
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.studies.goodput", description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="the gateway's URL")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each stream")
    parser.add_argument("--vocabulary", type=int, default=900, help="token ids of prompts are below this")
    parser.add_argument("--signal", choices=["KILL", "STOP"], default="KILL", help="what an engine gets")
    parser.add_argument("--every-s", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=300.0, help="time with faults")
    parser.add_argument("--quiet-s", type=float, default=30.0, help="undisturbed time before, and after")
    parser.add_argument("--warm-s", type=float, default=10.0, help="time of the load before all that")
    return asyncio.run(study(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
