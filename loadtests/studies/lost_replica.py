"""The longest gaps of streams whose replica is lost, and of those beside them.

    python -m loadtests.studies.lost_replica -c FILE.yaml KEY=VALUE ... --streams 128 --prompt-tokens 1000 --tokens 400

Starts the engines and a gateway (without Ray) and sends the streams at once, undisturbed, then with each of `--hurt`: a
replica is killed, or stopped, when the streams have a third of their tokens. A gap is the time between two chunks; the
first token is not counted. Exits with 1 if a stream failed, or has another length.
"""

import argparse
import asyncio
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from engines.process.port import free_port
from gateway.config.load import load, with_secrets
from loadtests.chaos.process_fleet import ProcessFleet, healthy_within, running
from loadtests.fleet import named_apart
from loadtests.report.timeline import Timeline

_UP_S, _LOOK_S, _RATE_S = 120.0, 0.02, 3.0
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


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
                    timeline.feed(line, time.monotonic(), time.time())
                    if timeline.tokens > before:
                        self.arrivals.append((time.monotonic(), timeline.tokens - before))
            async with session.get(f"{url}/traces/{self.name}") as reply:
                attempts = [one for rollout in (await reply.json())["rollouts"] for one in rollout["attempts"]]
            self.has_moved = len({attempt["replica"] for attempt in attempts}) > 1
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.error = repr(error)


async def measured(fleet: ProcessFleet, hurt: str, args: argparse.Namespace) -> dict[str, float]:
    """Run all streams once, and hurt the first replica where that is asked for."""
    run, places = time.time_ns(), range(args.streams)
    streams = [Stream(f"{hurt or 'calm'}-{run}-{place}") for place in places]
    prompts = [[3 + run % 900, 3 + run // 900 % 900, 3 + place, *[5] * (args.prompt_tokens - 3)] for place in places]
    body = {"max_tokens": args.tokens, "ignore_eos": True, "return_token_ids": True, "stream": True}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=args.timeout_s)
    ) as session:
        asked = zip(streams, prompts, strict=True)
        tasks = [asyncio.create_task(one.run(session, fleet.url, body | {"prompt": [prompt]})) for one, prompt in asked]
        third = args.streams * args.tokens / 3
        while not tasks[0].done() and sum(one.tokens for one in streams) < third:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        hurt_at = time.monotonic()
        if hurt:
            fleet.signal(0, _SIGNALS[hurt])
        await asyncio.gather(*tasks)
        if hurt == "stop":
            fleet.signal(0, signal.SIGCONT)
    return _figures(streams, hurt_at, args.tokens)


def _figures(streams: Sequence[Stream], hurt_at: float, tokens: int) -> dict[str, float]:
    """`rate` is that of the streams that stayed, in the seconds after the time of the loss by that before it."""
    own = [one for one in streams if not one.has_moved]
    times = [(at - hurt_at, made) for one in own for at, made in one.arrivals]
    before = sum(made for at, made in times if -_RATE_S < at <= 0)
    after = sum(made for at, made in times if 0 < at <= _RATE_S)
    moved = [one for one in streams if one.has_moved]
    return {
        "moved": len(moved),
        "longest gap of one that stayed, s": max((one.longest_gap_s(hurt_at) for one in own), default=0.0),
        "longest gap of one that moved, s": max((one.longest_gap_s(hurt_at) for one in moved), default=0.0),
        "rate of those that stayed": after / max(1, before),
        "seconds": max(one.arrivals[-1][0] for one in streams if one.arrivals) - hurt_at,
        "failed": sum(bool(one.error) for one in streams),
        "of another length": sum(one.tokens != tokens and not one.error for one in streams),
    }


async def study(args: argparse.Namespace) -> list[dict[str, float]]:
    config = with_secrets(load(args.config, args.overrides))
    port = config.gateway.port or free_port()
    config = config.model_copy(update={"gateway": config.gateway.model_copy(update={"port": port})})
    found = []
    with tempfile.TemporaryDirectory(prefix="lost-replica-") as folder, named_apart(config) as own:
        fleet = ProcessFleet(own, Path(folder))
        async with running(fleet):
            for hurt in ("", "", *args.hurt):
                await healthy_within(fleet.url, _UP_S)
                found.append(await measured(fleet, hurt, args))
                shown = (f"{name} {number:.3g}" for name, number in found[-1].items())
                print(f"{hurt or 'nothing':<8} " + ", ".join(shown), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.lost_replica", description=__doc__.splitlines()[0]
    )
    parser.add_argument("-c", "--config", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the file's")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--hurt", nargs="*", choices=list(_SIGNALS), default=["stop", "kill"])
    parser.add_argument("--timeout-s", type=float, default=120.0, help="longest time of a stream")
    found = asyncio.run(study(parser.parse_args()))
    return int(any(one["failed"] or one["of another length"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
