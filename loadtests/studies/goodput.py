"""Tokens a second that streams get while engines are hurt again and again, beside the same undisturbed, and their gaps.

    python -m loadtests.studies.goodput -c FILE.yaml KEY=VALUE ... --streams 256 --every-s 30 --seconds 300

Starts the engines and a gateway without Ray, or takes the fleet of `rollout-gateway up` on this machine with `--url`.
Undisturbed seconds come before and after. Replicas are hurt in turn; one that does not serve at its turn is left out. A
gap is the time between two chunks of a stream. Exits with 1 if a stream failed or has another length.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from engines.process.port import free_port
from gateway.config.load import load, with_secrets
from loadtests.chaos.process_fleet import ProcessFleet, healthy_within, running
from loadtests.fleet import named_apart
from loadtests.report.timeline import Timeline

_UP_S, _TIMEOUT_S = 120.0, 300.0


class Stream:
    """One streamed completion: `arrivals` has the time and tokens of each chunk."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arrivals: list[tuple[float, int]] = []
        self.error = ""
        self.has_moved = False

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)

    def longest_gap_s(self, since: float) -> float:
        """Return the longest time between two chunks of which the later came after this time."""
        times = [at for at, _ in self.arrivals]
        return max((after - before for before, after in itertools.pairwise(times) if after > since), default=0.0)

    async def run(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        """Ask, read to the end, and find out whether another replica had to continue it."""
        timeline = Timeline()
        try:
            async with session.post(url + "/v1/completions", json=body, headers={"X-Request-Id": self.name}) as reply:
                async for line in reply.content:
                    before = timeline.tokens
                    timeline.feed(line, time.monotonic())
                    if timeline.tokens > before:
                        self.arrivals.append((time.monotonic(), timeline.tokens - before))
            async with session.get(f"{url}/traces/{self.name}") as reply:
                attempts = [one for rollout in (await reply.json())["rollouts"] for one in rollout["attempts"]]
            self.has_moved = len(attempts) > 1  # a successor may have the name of the replica before
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.error = repr(error)


async def ask_on(session: aiohttp.ClientSession, streams: list[Stream], caller: int, args: argparse.Namespace) -> None:
    """Run one stream after another, until cancelled, and append each to `streams`."""
    drawn = random.Random(caller)
    body = {"max_tokens": args.tokens, "ignore_eos": True, "return_token_ids": True, "stream": True}
    await asyncio.sleep(4 * drawn.random())  # callers in step would send all their prompts at once
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
    return told(streams, times, hurts, args.tokens)


def told(streams: Sequence[Stream], times: Sequence[float], hurts: int, tokens: int) -> int:
    """Print the figures of the parts between these four times; return 1 if a stream failed or has another length."""
    rates = [made_between(streams, begin, end) / (end - begin) for begin, end in itertools.pairwise(times)]
    undisturbed = (rates[0] + rates[2]) / 2
    done = [one for one in streams if one.error or one.tokens >= tokens]
    failed = [one for one in done if one.error or one.tokens != tokens]
    shown = ", ".join(f"{rate:.0f}" for rate in rates)
    goodput = rates[1] / undisturbed if undisturbed else 0.0
    print(f"tokens/s before, during and after: {shown}; {hurts} engines hurt; goodput {goodput:.3f}")
    moved, stayed = (
        max((one.longest_gap_s(times[1]) for one in done if one.has_moved is moves), default=0.0)
        for moves in (True, False)
    )
    print(f"longest gap of a stream that moved {moved:.2f} s, of one that stayed {stayed:.2f} s")
    print(f"{len(done)} streams ended, {len(failed)} failed or of another length", *(one.error for one in failed[:3]))
    return int(bool(failed))


def made_between(streams: Sequence[Stream], begin: float, end: float) -> int:
    return sum(tokens for one in streams for at, tokens in one.arrivals if begin < at <= end)


@asynccontextmanager
async def started(args: argparse.Namespace) -> AsyncIterator[str]:
    """Run a fleet of this configuration; yield its URL."""
    config = with_secrets(load(args.config, args.overrides))
    port = config.gateway.port or free_port()
    config = config.model_copy(update={"gateway": config.gateway.model_copy(update={"port": port})})
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder, named_apart(config) as own:
        async with running(fleet := ProcessFleet(own, Path(folder))):
            await healthy_within(fleet.url, _UP_S)
            yield fleet.url


async def run(args: argparse.Namespace) -> int:
    if args.url:
        return await study(args)
    async with started(args) as args.url:
        return await study(args)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.studies.goodput", description=__doc__.splitlines()[0])
    parser.add_argument("-c", "--config", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the file's")
    parser.add_argument("--url", default="", help="the URL of a gateway that runs")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each stream")
    parser.add_argument("--vocabulary", type=int, default=900, help="token ids of prompts are below this")
    parser.add_argument("--signal", choices=["KILL", "STOP"], default="KILL", help="what an engine gets")
    parser.add_argument("--every-s", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=300.0, help="time with faults")
    parser.add_argument("--quiet-s", type=float, default=30.0, help="undisturbed time before, and after")
    parser.add_argument("--warm-s", type=float, default=10.0, help="time of the load before all that")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(asyncio.run(run(parsed())))
