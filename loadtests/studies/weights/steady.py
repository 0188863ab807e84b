"""Tokens/s of one steady load with an update every few seconds, and of the same load without, in turn.

    python -m loadtests.studies.weights.steady -c FILE.yaml --transport nccl --device cuda:1 --json out.json

Starts the engines, a gateway over them, without Ray, a trainer's process that pushes weights of the served model's
shapes, and clients. The load never stops: windows without updates (`--quiet-s`) and with one every `--every-s`
(`--updates-s`) follow each other, a quiet one first and last. Tokens are the engines' own counts. The table has a
window a line, then the ratio of both kinds, and the rate in each quarter of a second after a push begins, averaged over
all pushes: when work is lost tells what takes it.
"""

import argparse
import asyncio
import multiprocessing
import random
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import aiohttp
import orjson

from gateway.config.load import load as load_config
from gateway.fleet.watch.engine_page import read_total
from loadtests.fleet import LocalFleet
from loadtests.studies.weights.pusher import Pushed, Pusher
from loadtests.workloads import random_tokens
from trainer_client.transports.sender import TransportName

_COUNTERS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
_EVERY_S = 0.2
_WARM_S = 12.0
_BIN_S = 0.25


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the run. `rate` is in tokens/s."""

    began: float
    ended: float
    has_updates: bool
    rate: float


class TokenCount:
    """The engines' counts of generated tokens, read again and again."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self.times: list[float] = []
        self.totals: list[float] = []

    async def follow(self) -> None:
        """Read until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
            while True:
                began = time.time()
                pages = await asyncio.gather(*(self._page(session, url) for url in self._urls))
                self.times.append((began + time.time()) / 2)
                self.totals.append(sum(read_total(page, _COUNTERS) or 0.0 for page in pages))
                await asyncio.sleep(_EVERY_S)

    async def _page(self, session: aiohttp.ClientSession, url: str) -> str:
        async with session.get(f"{url}/metrics") as reply:
            return await reply.text()

    def rate(self, began: float, ended: float) -> float:
        """Tokens/s between two times of the past."""
        return (self._at(ended) - self._at(began)) / (ended - began)

    def _at(self, moment: float) -> float:
        after = min(max(bisect_left(self.times, moment), 1), len(self.times) - 1)
        (a, b), (x, y) = self.times[after - 1 : after + 1], self.totals[after - 1 : after + 1]
        return x + (y - x) * (moment - a) / (b - a)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the windows, pushes, records of updates and errors of a run."""
    config = load_config(args.config, args.overrides)
    fleet = LocalFleet(config)
    try:
        infos = await fleet.start_engines()
        async with fleet.gateway(config, infos) as gateway:
            pusher = await asyncio.to_thread(Pusher, gateway.url, args.transport, args.device, args.timeout_s)
            with pusher:
                return await _measured(args, gateway.url, [info.url for info in infos], pusher)
    finally:
        await fleet.stop()


async def _measured(args: argparse.Namespace, url: str, engines: Sequence[str], pusher: Pusher) -> dict[str, Any]:
    await asyncio.to_thread(pusher.push)  # opens the group
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sampling = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    load = (url, args.streams * len(engines), args.prompt_tokens, args.max_tokens, sampling, args.timeout_s)
    client = context.Process(target=_load, args=(theirs, *load), daemon=True)
    client.start()
    count = TokenCount(engines)
    following = asyncio.create_task(count.follow())
    windows, pushes = [], []
    try:
        await asyncio.sleep(_WARM_S)
        for number in range(2 * args.pairs + 1):
            began = time.time()
            if number % 2:
                pushes += await _pushed(pusher, began, args.every_s, args.updates_s)
            ended = began + (args.updates_s if number % 2 else args.quiet_s)
            await asyncio.sleep(max(0.0, ended - time.time()) + 2 * _EVERY_S)
            windows.append(Window(began, ended, bool(number % 2), count.rate(began, ended)))
            print(f"{'updates' if number % 2 else 'quiet':8s} {windows[-1].rate:9.0f} tokens/s", flush=True)
    finally:
        following.cancel()
        ours.send(None)
    errors = await asyncio.to_thread(ours.recv) if await asyncio.to_thread(ours.poll, args.timeout_s) else ["no client"]
    return _report(args, windows, pushes, count) | {"errors": errors, "updates": await _records(url, len(pushes))}


async def _pushed(pusher: Pusher, began: float, every_s: float, seconds: float) -> list[tuple[float, Pushed]]:
    """Push every so many seconds. Return the time of each push's begin with its end."""
    pushes = []
    for number in range(int(seconds / every_s)):
        await asyncio.sleep(max(0.0, began + (number + 0.1) * every_s - time.time()))
        at = time.time()
        pushes.append((at, await asyncio.to_thread(pusher.push)))
    return pushes


def _report(
    args: argparse.Namespace, windows: Sequence[Window], pushes: Sequence[tuple[float, Pushed]], count: TokenCount
) -> dict[str, Any]:
    quiet, busy = ([one.rate for one in windows if one.has_updates is kind] for kind in (False, True))
    quiet_rate = sum(quiet) / len(quiet)
    ratio = sum(busy) / len(busy) / quiet_rate
    profile = [
        sum(count.rate(at + index * _BIN_S, at + (index + 1) * _BIN_S) for at, _ in pushes) / len(pushes) / quiet_rate
        for index in range(int(0.8 * args.every_s / _BIN_S))
    ]
    return {
        "every_s": args.every_s, "streams": args.streams, "ratio": ratio, "lost_s": (1 - ratio) * args.every_s,
        "windows": [asdict(one) for one in windows], "pushes": [(at, asdict(push)) for at, push in pushes],
        "rate_by_quarter_second": profile,
    }  # fmt: skip


async def _records(url: str, count: int) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/weight_updates") as reply:
        records: list[dict[str, Any]] = (await reply.json())["weight_updates"]
    return records[:count]


def _load(pipe: Any, url: str, streams: int, *load: Any) -> None:
    """Keep so many requests running until the pipe says to end; answer with the errors."""
    pipe.send(asyncio.run(_requests(pipe, url, streams, *load)))


async def _requests(
    pipe: Any, url: str, streams: int, prompt_tokens: int, max_tokens: int, sampling: dict[str, Any], timeout_s: float
) -> list[str]:
    ending, errors = asyncio.Event(), list[str]()
    asyncio.get_running_loop().add_reader(pipe.fileno(), ending.set)
    timeout, connector = aiohttp.ClientTimeout(total=timeout_s), aiohttp.TCPConnector(limit=0)

    async def caller(session: aiohttp.ClientSession, draw: random.Random) -> None:
        await asyncio.sleep(4 * draw.random())  # callers in step would send all their prompts at once
        while not ending.is_set():
            length = draw.randrange(2 * max_tokens // 3, 4 * max_tokens // 3)
            body = {"prompt": random_tokens(draw, prompt_tokens), "max_tokens": length, **sampling}
            try:
                async with session.post(f"{url}/v1/completions", json=body) as reply:
                    if reply.status != 200:
                        errors.append((await reply.text())[:200])
                    await reply.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                errors.append(repr(error))
                return

    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(caller(session, random.Random(index)) for index in range(streams)))
    return errors


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study. The exit status is 1 if a push or a request failed."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.weights.steady", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("-c", "--config", type=Path, metavar="FILE", required=True)
    add("--transport", choices=(*get_args(TransportName), "trl"), default="nccl", help="trl: TRL's own client")
    add("--device", default="cpu", help="device of the trainer's tensors, such as cuda:1")
    add("--every-s", type=float, default=10.0, help="from one push to the next")
    add("--updates-s", type=float, default=40.0, help="a window with updates")
    add("--quiet-s", type=float, default=15.0, help="a window without")
    add("--pairs", type=int, default=3)
    add("--streams", type=int, default=256, help="requests per replica")
    add("--prompt-tokens", type=int, default=256)
    add("--max-tokens", type=int, default=600, help="mean; from two thirds to four thirds of it")
    add("--timeout-s", type=float, default=300.0)
    add("--json", type=Path, metavar="FILE")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the file's")
    args = parser.parse_intermixed_args(argv)
    report = asyncio.run(run(args))
    if args.json:
        args.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    failed = [push["error"] for _, push in report["pushes"] if push["error"]] + report["errors"]
    print(f"ratio {report['ratio']:.4f}: an update every {args.every_s:g} s costs {report['lost_s']:.3f} s of work")
    print("after a push:", *(f"{rate:.2f}" for rate in report["rate_by_quarter_second"]))
    print(f"{len(report['pushes'])} updates, {len(failed)} failed", *failed[:3])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
