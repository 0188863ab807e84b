"""The effect of a lever: the same load on engines that differ in one setting, each on its own GPUs.

    python -m loadtests.studies.levers -c base.yaml --variant "graphs" --variant "eager: engine.enforce_eager=true" \
        --streams 64 512 --batch 64x8 --runs 3 --json out.json

A variant overrides settings of the file: `NAME: KEY=VALUE KEY=VALUE`. Variants run in waves, as many at a time as GPUs
allow, in the given order. Each is compared with the first of its wave, since GPUs that work together are slower than
one alone. Loads are given per GPU, so that a tensor-parallel pair and two single engines have the same work. Replies
are read in chunks, as by the gateway; `--whole` requests whole replies.
"""

import argparse
import asyncio
import dataclasses
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from engines.errors import ConfigError, DeadlineExceeded, EngineError
from engines.process.engine_server import EngineServer
from engines.process.launch import gpus_per_replica
from gateway.config.load import load as load_config
from gateway.config.node_gpus import visible_gpus
from gateway.config.schema import Config
from loadtests.fleet import engine_servers
from loadtests.studies.clients import ClientPool, Stream, total
from loadtests.studies.ratios import pair_ratios
from loadtests.workloads import LengthMix, Workload, parse_batch

_CLIENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Callers per GPU. A batch is one caller whose request has all prompts."""

    name: str
    callers: int
    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One run of one variant under one load."""

    variant: str
    load: str
    wave: int
    run: int
    gpus: int
    wall_s: float
    completions: int
    tokens: int
    median_latency_s: float
    p99_latency_s: float
    client_busy: float
    errors: list[str]

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.wall_s / self.gpus


@dataclass(slots=True)
class Variant:
    """A setting of the levers. `gpus` counts engines if they have no GPU."""

    name: str
    overrides: tuple[str, ...]
    config: Config
    start_s: float = 0.0
    failure: str = ""
    urls: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str, path: Path | None) -> "Variant":
        name, _, settings = text.partition(":")
        overrides = tuple(shlex.split(settings))
        return cls(name.strip(), overrides, load_config(path, overrides))

    @property
    def needed_gpus(self) -> int:
        return sum(gpus_per_replica(group) * group.num_replicas for group in self.config.groups.values())

    @property
    def gpus(self) -> int:
        return self.needed_gpus or sum(group.num_replicas for group in self.config.groups.values())


class Wave:
    """Variants that run at the same time, each with its own GPUs and clients."""

    def __init__(self, number: int, variants: Sequence[Variant], gpus: Sequence[str], timeout_s: float) -> None:
        self.number = number
        self.variants = list(variants)
        self._timeout_s = timeout_s
        self._servers: dict[str, list[EngineServer]] = {}
        free = list(gpus)
        for variant in variants:
            own, free = free[: variant.needed_gpus], free[variant.needed_gpus :]
            self._servers[variant.name] = engine_servers(variant.config, own)

    async def start(self) -> None:
        """Start the variants. A failed start is recorded as the variant's result."""
        await asyncio.gather(*(self._start(variant) for variant in self.variants))

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop() for servers in self._servers.values() for server in servers))

    def measure(self, loads: Sequence[Load], runs: int, *, streamed: bool) -> list[Measure]:
        """Run every load `runs` times on all variants at once, after an unrecorded run."""
        running = [variant for variant in self.variants if variant.urls]
        found: list[Measure] = []
        if not running:
            return found
        pools = {variant.name: ClientPool(_CLIENTS, self._timeout_s) for variant in running}
        try:
            with ThreadPoolExecutor(len(running)) as threads:
                for load in loads:
                    for run in range(-1, runs):
                        measures = threads.map(
                            lambda variant, load=load, run=run: self._run(
                                variant, load, run, pools[variant.name], streamed=streamed
                            ),
                            running,
                        )
                        found += _said(list(measures), counts=run >= 0)
        finally:
            for pool in pools.values():
                pool.close()
        return found

    async def _start(self, variant: Variant) -> None:
        began = time.monotonic()
        starting = await asyncio.gather(
            *(server.start() for server in self._servers[variant.name]), return_exceptions=True
        )
        variant.start_s = time.monotonic() - began
        for result in starting:
            if isinstance(result, EngineError | ConfigError | DeadlineExceeded):
                variant.failure = str(result)
                print(f"{variant.name}: {result}", file=sys.stderr)
                return
            if isinstance(result, BaseException):
                raise result
            variant.urls.append(result.url)

    def _run(self, variant: Variant, load: Load, run: int, clients: ClientPool, *, streamed: bool) -> Measure:
        streams = [
            Stream(
                url=variant.urls[index % len(variant.urls)],
                workload=load.workload,
                seeds=(f"{variant.name} {load.name} {self.number} {run} {index}",),
                stream=streamed,
            )
            for index in range(load.callers * variant.gpus)
        ]
        totals = dataclasses.asdict(total(clients.run(streams)))
        return Measure(variant=variant.name, load=load.name, wave=self.number, run=run, gpus=variant.gpus, **totals)


def waves(variants: Sequence[Variant], num_gpus: int) -> list[list[Variant]]:
    """Return waves of the variants in order, each as large as the GPUs allow."""
    if too_large := [variant.name for variant in variants if variant.needed_gpus > num_gpus]:
        raise ConfigError(f"variant {too_large[0]!r} needs more than the {num_gpus} GPUs that are here")
    found: list[list[Variant]] = [[]]
    for variant in variants:
        if found[-1] and sum(one.needed_gpus for one in found[-1]) + variant.needed_gpus > num_gpus:
            found.append([])
        found[-1].append(variant)
    return found


def summarise(measures: Sequence[Measure]) -> list[dict[str, Any]]:
    """Return a row per wave, load and variant, compared with the wave's first variant."""
    rows = []
    for key in dict.fromkeys((one.wave, one.load) for one in measures):
        beside = [one for one in measures if (one.wave, one.load) == key]
        first = [one.tokens_per_s_per_gpu for one in beside if one.variant == beside[0].variant]
        for name in dict.fromkeys(one.variant for one in beside):
            ours = [one for one in beside if one.variant == name]
            speeds = [one.tokens_per_s_per_gpu for one in ours]
            rows.append(
                {
                    "wave": key[0],
                    "load": key[1],
                    "variant": name,
                    "gpus": ours[0].gpus,
                    "tokens_per_s_per_gpu": statistics.median(speeds),
                    "against_first": statistics.median(pair_ratios(speeds, first)) if all(first) else None,
                    "median_latency_s": statistics.median(one.median_latency_s for one in ours),
                    "p99_latency_s": statistics.median(one.p99_latency_s for one in ours),
                    "client_busy": max(one.client_busy for one in ours),
                    "errors": sum(len(one.errors) for one in ours),
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the summary as text."""
    cells = [["wave", "load/GPU", "variant", "GPUs", "tokens/s/GPU", "against first", "latency p50/p99 s", "errors"]]
    cells += [
        [
            str(row["wave"] + 1),
            row["load"],
            row["variant"],
            str(row["gpus"]),
            f"{row['tokens_per_s_per_gpu']:.0f}",
            f"{row['against_first']:.3f}" if row["against_first"] is not None else "-",
            f"{row['median_latency_s']:.2f}/{row['p99_latency_s']:.2f}",
            str(row["errors"]),
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _said(measures: list[Measure], *, counts: bool) -> list[Measure]:
    for one in measures:
        speed = f"{one.tokens_per_s_per_gpu:8.0f} tok/s/GPU {one.wall_s:6.2f} s"
        print(f"{'run' if counts else 'warm-up'} {one.load:>8} {one.variant:<24} {speed}", file=sys.stderr, flush=True)
        for error in one.errors[:2]:
            print("   ", error[:300], file=sys.stderr)
    return measures if counts else []


def _loads(args: argparse.Namespace) -> list[Load]:
    def load(name: str, callers: int, prompts: int, samples: int) -> Load:
        workload = Workload(
            prompts=prompts, samples=samples, prompt_tokens=args.prompt_tokens, max_tokens=args.max_tokens
        )
        return Load(name=name, callers=callers, workload=workload)

    batches = map(parse_batch, args.batch)
    return [
        *(load(str(streams), streams, 1, 1) for streams in args.streams),
        *(load(f"{prompts}x{samples}", 1, prompts, samples) for prompts, samples in batches),
    ]


def _report(args: argparse.Namespace, variants: Sequence[Variant], measures: Sequence[Measure]) -> dict[str, Any]:
    return {
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "label": args.label,
        "prompt_tokens": str(args.prompt_tokens),
        "max_tokens": args.max_tokens,
        "streamed": not args.whole,
        "variants": [
            {
                "name": one.name,
                "settings": one.overrides,
                "start_s": round(one.start_s, 1),
                "failure": one.failure[:2000],
            }
            for one in variants
        ],
        "summary": summarise(measures),
        "measures": [dataclasses.asdict(one) for one in measures],
    }


async def _measure_all(args: argparse.Namespace, variants: Sequence[Variant]) -> list[Measure]:
    gpus, measures, began = visible_gpus(), list[Measure](), time.monotonic()
    for number, members in enumerate(waves(variants, len(gpus))):
        if time.monotonic() - began > args.budget_s:
            print(f"stopped before wave {number + 1}: {args.budget_s:g} s are over", file=sys.stderr)
            break
        wave = Wave(number, members, gpus, args.timeout_s)
        try:
            await wave.start()
            measures += await asyncio.to_thread(wave.measure, _loads(args), args.runs, streamed=not args.whole)
        finally:
            await wave.stop()
        # After each wave, so that an interrupted run keeps its results.
        if args.json:
            args.json.write_bytes(orjson.dumps(_report(args, variants, measures), option=orjson.OPT_INDENT_2))
    return measures


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.studies.levers", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-c", "--config", type=Path, metavar="FILE")
    add("--variant", action="append", required=True, metavar="'NAME: KEY=VALUE ...'")
    add("--streams", type=int, nargs="*", default=[], metavar="N", help="loads of N single streams per GPU")
    add("--batch", nargs="*", default=[], metavar="PxN", help="loads of one request of P prompts x N samples per GPU")
    add("--prompt-tokens", type=LengthMix.parse, default=LengthMix.parse("256"), help="256, or a mix: 128*3,1024*1")
    add("--max-tokens", type=int, default=256)
    add("--runs", type=int, default=3)
    add("--whole", action="store_true", help="request whole replies instead of streams")
    add("--timeout-s", type=float, default=300.0, help="limit on a run")
    add("--budget-s", type=float, default=float("inf"), help="start no further wave after this many seconds")
    add("--label", default="", help="label for the report")
    add("--json", type=Path, metavar="FILE", help="write every run and the summary")
    args = parser.parse_args(argv)
    if not args.streams and not args.batch:
        args.streams = [64]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse_arguments(argv)
    try:
        variants = [Variant.parse(text, args.config) for text in args.variant]
        measures = asyncio.run(_measure_all(args, variants))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(summarise(measures)))
    return 1 if any(variant.failure for variant in variants) or any(one.errors for one in measures) else 0


if __name__ == "__main__":
    sys.exit(main())
