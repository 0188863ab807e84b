"""The cost of weight updates for rollouts: tokens/s of one steady load with an update every few seconds, and without.

    python -m loadtests.studies.weights.weight_cost -c FILE.yaml --transport nccl --device cuda:1 --json out.json
    python -m loadtests.studies.weights.weight_cost -c FILE.yaml --device cuda:1 --restores 2 \
        --variant "staged: transport=nccl weights.relay=never" \
        --variant "flat: transport=nccl weights.relay=never weights.stage=never"

Starts the engines, a gateway over them, without Ray, a trainer's process that pushes weights of the served model's
shapes, and clients. Variants are settings of the gateway over the file's: one after the other has the same engines. The
load never stops: windows without updates (`--quiet-s`) and with one every `--every-s` (`--updates-s`) follow each
other, a quiet one first and last. Tokens are the engines' own counts. The updates' own records have the time for which
generation stood still, and the time of each step.

`--restores` are updates refused by the canary, and, of more than 2 GiB, updates that their trainer gives up half sent,
all beside the load: their figures are the time for which they stopped generation, and that from the refusal to the
first completion of the version before, which waits behind the load's prompts. TRL's client sends no
log-probs, so the canary refuses NaN of it.
"""

import argparse
import asyncio
import os
import random
import shlex
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

import aiohttp
import orjson

from engines.errors import ConfigError, EngineStartFailed
from engines.types import ReplicaInfo
from gateway.config.load import load as load_config
from gateway.fleet.watch.engine_page import read_total
from loadtests.fleet import LocalFleet
from loadtests.own_process import OwnProcess
from loadtests.studies.weights.pusher import Flaw, Pushed, Pusher, Way
from loadtests.workloads import random_tokens
from trainer_client.transports.sender import TransportName

_WAYS: tuple[Way, ...] = (*get_args(TransportName), "trl")
_COUNTERS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
_READ_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the run. `rate` is in tokens/s."""

    began: float
    ended: float
    has_updates: bool
    rate: float


@dataclass(frozen=True, slots=True)
class Restore:
    """A refused update. `seconds` from its end to the first completion, made by `version`. `stopped_s` is the time for
    which the update itself stopped generation."""

    flaw: Flaw
    seconds: float
    version: int
    staged: bool
    stopped_s: float
    error: str

    def __str__(self) -> str:
        return (
            f"refused ({'staged, ' if self.staged else ''}{self.flaw}): generation stopped for {self.stopped_s:.3f} s, "
            f"and version {self.version} made its first completion after {self.seconds:.3f} s"
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of the gateway and the trainer's transport."""

    name: str
    transport: Way
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, transport: Way | None) -> "Variant":
        """Parse `NAME: transport=nccl KEY=VALUE`. Raise `ConfigError` without a transport."""
        name, _, settings = text.partition(":")
        told = dict(word.partition("=")[::2] for word in shlex.split(settings))
        asked = told.pop("transport", transport)
        chosen = next((known for known in _WAYS if known == asked), None)
        if chosen is None:
            raise ConfigError(f"variant {name!r} names no transport: say transport=store, gloo, nccl or trl")
        return cls(name.strip(), chosen, tuple(f"{key}={value}" for key, value in told.items()))


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
                await asyncio.sleep(_READ_EVERY_S)

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


class Bench:
    """One gateway with its load, and a trainer."""

    def __init__(self, url: str, engines: Sequence[str], pusher: Pusher, args: argparse.Namespace) -> None:
        self._url = url
        self._engines = engines
        self._pusher = pusher
        self._args = args
        self._count = TokenCount(engines)
        self.windows: list[Window] = []
        self.pushes: list[tuple[float, Pushed]] = []
        self.updates: list[dict[str, Any]] = []
        self.restores: list[Restore] = []
        self.errors: list[str] = []

    async def measure(self, restores: int) -> None:
        """Measure all windows, then so many refused updates of each flaw."""
        await asyncio.to_thread(self._pusher.push)  # opens the group
        async with self._loaded(), asyncio.TaskGroup() as group:
            following = group.create_task(self._count.follow())
            await asyncio.sleep(self._args.warm_s)
            for number in range(2 * self._args.pairs + 1):
                await self._window(has_updates=bool(number % 2))
            self.updates = await self._records(len(self.pushes))
            for flaw in self._pusher.flaws() * restores:
                self.restores.append(await self._restore(flaw))
            following.cancel()

    @asynccontextmanager
    async def _loaded(self) -> AsyncIterator[None]:
        """Have the load during the block, from a process of its own; keep its errors."""
        client = OwnProcess(_load, self._url, len(self._engines), self._args)
        await asyncio.to_thread(client.receive, self._args.timeout_s)  # its modules are loaded
        try:
            yield
        finally:
            client.pipe.send(None)
            self.errors = await asyncio.to_thread(client.receive, self._args.timeout_s)

    async def _window(self, *, has_updates: bool) -> None:
        began = time.time()
        if has_updates:
            for number in range(int(self._args.updates_s / self._args.every_s)):
                await asyncio.sleep(max(0.0, began + (number + 0.1) * self._args.every_s - time.time()))
                at = time.time()
                self.pushes.append((at, await asyncio.to_thread(self._pusher.push)))
        ended = began + (self._args.updates_s if has_updates else self._args.quiet_s)
        await asyncio.sleep(max(0.0, ended - time.time()) + 2 * _READ_EVERY_S)
        window = Window(began, ended, has_updates, self._count.rate(began, ended))
        self.windows.append(window)
        print(f"{'updates' if has_updates else 'quiet':8s} {window.rate:9.0f} tokens/s", file=sys.stderr, flush=True)

    async def _restore(self, flaw: Flaw) -> Restore:
        pushing = asyncio.create_task(asyncio.to_thread(self._pusher.push_in_vain, flaw))
        answers = []
        while not pushing.done():  # the trainer's own end of a refused push takes longer than a replica's
            answers.append(await self._answered())
        pushed = await pushing
        if not pushed.error:
            raise ConfigError("the canary let pass what it should not: weights.canary.enabled must be true")
        answers.append(await self._answered())
        refused, before = await self._records(2)
        if before["end"] != "committed":
            raise ConfigError(f"the update before the one to be refused failed: {pushed.error}")
        ended = datetime.fromisoformat(refused["started"]).timestamp() + float(refused["age_s"])
        served, version = next((at, version) for at, version in answers if at > ended)
        return Restore(
            flaw, served - ended, version, staged=refused["staged"], stopped_s=refused["stopped_s"], error=pushed.error,
        )  # fmt: skip

    async def _answered(self) -> tuple[float, int]:
        """Ask for one token; return the time of the reply and the version that made it."""
        reply = await self._ask("POST", "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1})
        return time.time(), reply["choices"][0]["weight_versions"][-1]["version"]

    async def _records(self, count: int) -> list[dict[str, Any]]:
        """Return the gateway's records of the last `count` updates."""
        records: list[dict[str, Any]] = (await self._ask("GET", "/v1/weight_updates"))["weight_updates"]
        return records[:count]

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=self._args.timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, f"{self._url}{path}", json=body) as reply,
        ):
            reply.raise_for_status()
            answer: dict[str, Any] = await reply.json()
        return answer

    def report(self) -> dict[str, Any]:
        """Return all that was measured so far, with its summary if there is a window of each kind."""
        is_whole = any(window.has_updates for window in self.windows)
        return {
            "summary": summarise(self.windows, self.updates, self._args.every_s) if is_whole else {},
            "windows": [asdict(one) for one in self.windows], "pushes": [(at, asdict(one)) for at, one in self.pushes],
            "updates": self.updates, "restores": [asdict(one) for one in self.restores], "errors": self.errors,
            "tokens": list(zip(self._count.times, self._count.totals, strict=True)),
        }  # fmt: skip


def summarise(windows: Sequence[Window], updates: Sequence[dict[str, Any]], every_s: float) -> dict[str, Any]:
    """Return the ratio of the rates (the median of windows with updates, each over the two beside it), the seconds of
    work that an update costs, and of the updates' records the medians."""
    rates = [one.rate for one in windows]
    ratio = statistics.median(2 * u / (a + b) for a, u, b in zip(rates[:-2:2], rates[1::2], rates[2::2], strict=True))
    names = dict.fromkeys(step for record in updates for step in record["seconds"])
    return {
        "ratio": ratio, "lost_s": (1 - ratio) * every_s, "updates": len(updates),
        "staged": sum(record["staged"] for record in updates),
        "stopped_s": statistics.median(record["stopped_s"] for record in updates),
        "stopped_s_max": max(record["stopped_s"] for record in updates),
        "seconds": {
            step: statistics.median(record["seconds"][step] for record in updates if step in record["seconds"])
            for step in names
        },
    }  # fmt: skip


def told(name: str, report: dict[str, Any], every_s: float) -> str:
    """Return what was measured of a variant as text. A staged transfer takes place while rollouts go on."""
    row = report["summary"]
    steps = ", ".join(f"{step} {seconds:.3f}" for step, seconds in row["seconds"].items())
    lines = [
        f"tokens/s {row['ratio']:.4f} of those without: an update every {every_s:g} s costs {row['lost_s']:.3f} s of "
        f"work, and stops generation for {row['stopped_s']:.3f} s, at most {row['stopped_s_max']:.3f} s",
        f"{row['staged']} of {row['updates']} staged; {steps} s",
        *(str(Restore(**restore)) for restore in report["restores"]),
    ]
    return "\n".join(f"{name}: {line}" for line in lines)


def _load(pipe: Connection, url: str, replicas: int, args: argparse.Namespace) -> None:
    """Keep requests running until the pipe says to end; answer with the errors."""
    pipe.send("ready")
    pipe.send(asyncio.run(_requests(pipe, url, replicas * args.streams, args)))


async def _requests(pipe: Connection, url: str, streams: int, args: argparse.Namespace) -> list[str]:
    ending, errors = asyncio.Event(), list[str]()
    asyncio.get_running_loop().add_reader(pipe.fileno(), ending.set)
    timeout, connector = aiohttp.ClientTimeout(total=args.timeout_s), aiohttp.TCPConnector(limit=0)
    sampling = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True}

    async def caller(session: aiohttp.ClientSession, draw: random.Random) -> None:
        await asyncio.sleep(4 * draw.random())  # callers in step would send all their prompts at once
        least = 1  # the first ends at any time, as a rollout that began long ago: the load is the same from then on
        while not ending.is_set():
            length, least = draw.randrange(least, 4 * args.max_tokens // 3), 2 * args.max_tokens // 3
            body = {"prompt": random_tokens(draw, args.prompt_tokens), "max_tokens": length, **sampling}
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


async def _measured(args: argparse.Namespace) -> dict[str, Any]:
    config = load_config(args.config, args.overrides)
    variants = [Variant.parse(text, args.transport) for text in args.variant or [args.transport or "as it is"]]
    fleet = LocalFleet(config)
    try:
        infos = await fleet.start_engines()
        report: dict[str, Any] = {
            "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cpus": os.cpu_count(),
            "streams": args.streams, "prompt_tokens": args.prompt_tokens, "max_tokens": args.max_tokens,
            "every_s": args.every_s, "replicas": len(infos), "engine": f"{infos[0].kind} {infos[0].engine_version}",
            "variants": {},
        }  # fmt: skip
        for variant in variants:
            print(f"{variant.name}:", file=sys.stderr)
            settings = load_config(args.config, [*args.overrides, *variant.overrides])
            async with fleet.gateway(settings, infos) as gateway:
                restores = args.restores if settings.weights.store else 0  # without a store there is no rollback
                await _measure(variant, gateway.url, infos, args, restores, report)
    finally:
        await fleet.stop()
    return report


async def _measure(
    variant: Variant, url: str, infos: Sequence[ReplicaInfo], args: argparse.Namespace, restores: int, report: Any
) -> None:
    """Measure one variant. The report has the results so far also where it fails."""
    with await asyncio.to_thread(Pusher, url, variant.transport, args.device, args.timeout_s) as pusher:
        bench = Bench(url, [info.url for info in infos], pusher, args)
        report["bytes"] = pusher.num_bytes
        try:
            await bench.measure(restores)
        finally:
            report["variants"][variant.name] = {"settings": variant.overrides, **bench.report()}
            if args.json:
                args.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study. The exit status is 1 if an update failed or a rollout was not delivered."""
    args = _parse_arguments(argv)
    try:
        report = asyncio.run(_measured(args))
    except (ConfigError, EngineStartFailed) as error:
        print(error, file=sys.stderr)
        return 2
    failed: list[str] = []
    for name, variant in report["variants"].items():
        print(told(name, variant, args.every_s))
        failed += [push["error"] for _, push in variant["pushes"] if push["error"]] + variant["errors"]
    print(f"{report['bytes'] / 1e9:.3f} GB to {report['replicas']} replicas; {len(failed)} errors", *failed[:3])
    return 1 if failed else 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.weights.weight_cost", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("-c", "--config", type=Path, metavar="FILE")
    add("--transport", choices=_WAYS, help="of variants without their own; trl: TRL's own client")
    add("--variant", action="append", metavar="NAME: KEY=VALUE ...", help="a variant; repeatable")
    add("--device", default="cpu", help="device of the trainer's tensors, such as cuda:1")
    add("--every-s", type=float, default=10.0, help="from one push to the next")
    add("--updates-s", type=float, default=40.0, help="a window with updates")
    add("--quiet-s", type=float, default=15.0, help="a window without")
    add("--warm-s", type=float, default=12.0, help="of the load before the first window")
    add("--pairs", type=int, default=3, help="windows with updates, each between two without")
    add("--restores", type=int, default=0, help="refused updates of each kind per variant")
    add("--streams", type=int, default=256, help="requests per replica")
    add("--prompt-tokens", type=int, default=256)
    add("--max-tokens", type=int, default=600, help="mean; from two thirds to four thirds of it")
    add("--timeout-s", type=float, default=300.0, help="limit on a request, and on each wait of a push")
    add("--json", type=Path, metavar="FILE", help="write every window, update and summary")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the file's")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())
