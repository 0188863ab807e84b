"""The gateway beside alternatives, in alternating runs: the same load on engines directly, through the gateway, and
through vLLM's router.

    python -m loadtests.fleet -c examples/sim.yaml -- \
        python -m loadtests.studies.compare --gateway {url} --gateway-pid {pid} --engine {engines} \
        --sides direct gateway vllm-router --streams 64 --batch 64x8 --json out.json

Loads are given per engine, so a fleet of four has four times the streams of a fleet of one. Each run has its own
prompts, so that none is answered from the prefix cache. A batch is one request to the gateway or router, as from TRL;
directly, each engine gets its part.
"""

import argparse
import contextlib
import dataclasses
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson
import psutil

from loadtests.studies.clients import ClientPool, Stream, Totals, total
from loadtests.studies.ratios import median_lower_bound, pair_ratios
from loadtests.studies.routers import RouterFailed, running_router
from loadtests.workloads import LengthMix, Workload, parse_batch

_BUSY_CLIENT = 0.8
_ERRORS_SHOWN = 5


class Side(StrEnum):
    """The target of a load."""

    DIRECT = "direct"
    GATEWAY = "gateway"
    VLLM_ROUTER = "vllm-router"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Callers per engine. A batch is one request with all prompts, as from a trainer."""

    name: str
    streams: int
    is_batch: bool
    rounds: int
    workload: Workload


@dataclass(frozen=True, slots=True)
class Middle:
    """A server between clients and engines. `pid` is its process, whose CPU time is measured, if known."""

    url: str
    pid: int | None = None


Sides = dict[Side, Middle | None]
"""The server in the middle for each side; None where clients ask the engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Totals):
    """One side of one pair."""

    load: str
    side: Side
    pair: int
    middle_cpu_s: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


class Comparison:
    """Runs all loads on all sides, pair after pair, and keeps every run."""

    def __init__(self, sides: Sides, engines: Sequence[str], loads: Sequence[Load], clients: ClientPool) -> None:
        self.sides = sides
        self.engines = engines
        self.loads = loads
        self.runs: list[Run] = []
        self._clients = clients

    def warm_up(self) -> bool:
        """Run all once without record: engines compile and pools connect. Return True if every side delivered."""
        runs = [self._run(load, side, pair=-1) for load in self.loads for side in self.sides]
        return all(run.tokens for run in runs)

    def measure_pair(self, pair: int) -> None:
        """Run every side once per load, in an order that alternates between pairs."""
        for load in self.loads:
            for side in self.sides if pair % 2 == 0 else reversed(list(self.sides)):
                self.runs.append(self._run(load, side, pair))

    def _run(self, load: Load, side: Side, pair: int) -> Run:
        middle = self.sides[side]
        streams = streams_of(load, middle, self.engines, seed=f"{load.name} {side} {pair} {os.getpid()}")
        server = psutil.Process(middle.pid) if middle and middle.pid else None
        before = sum(server.cpu_times()[:2]) if server else 0.0  # without its children
        totals = total(self._clients.run(streams))
        used = sum(server.cpu_times()[:2]) - before if server else None
        run = Run(load=load.name, side=side, pair=pair, middle_cpu_s=used, **dataclasses.asdict(totals))
        _say(run)
        return run


def streams_of(load: Load, middle: Middle | None, engines: Sequence[str], seed: str) -> list[Stream]:
    """Return the callers of one run, spread over the engines unless a server in the middle places them."""
    num_streams, workload = load.streams * len(engines), load.workload
    if middle and load.is_batch:
        num_streams, workload = 1, dataclasses.replace(workload, prompts=workload.prompts * len(engines))
    return [
        Stream(
            url=middle.url if middle else engines[index % len(engines)],
            workload=workload,
            seeds=tuple(f"{seed} {index} {turn}" for turn in range(load.rounds)),
        )
        for index in range(num_streams)
    ]


def summarise(runs: Sequence[Run], load: str, side: Side, references: Sequence[Side]) -> dict[str, Any]:
    """Return medians of one side under one load, and its ratios to each reference of the same pair."""
    ours = [run for run in runs if (run.load, run.side) == (load, side)]
    speeds = [run.tokens_per_s for run in ours]
    row: dict[str, Any] = {
        "load": load,
        "side": side.value,
        "pairs": len(ours),
        "tokens_per_s": statistics.median(speeds),
        "median_latency_s": statistics.median(run.median_latency_s for run in ours),
        "p99_latency_s": statistics.median(run.p99_latency_s for run in ours),
        "client_busy": max(run.client_busy for run in ours),
        "errors": sum(len(run.errors) for run in ours),
        "ratios": {},
    }
    if all(run.middle_cpu_s is not None and run.tokens for run in ours):
        used = [(run.middle_cpu_s or 0.0, run) for run in ours]
        row["middle_cpu_s_per_million_tokens"] = statistics.median(cpu / run.tokens * 1e6 for cpu, run in used)
        row["middle_cores"] = statistics.median(cpu / run.wall_s for cpu, run in used)
    for reference in references:
        beside = [run.tokens_per_s for run in runs if (run.load, run.side) == (load, reference)]
        if all(beside):
            ratios = pair_ratios(speeds, beside)
            row["ratios"][reference.value] = {
                "median": statistics.median(ratios),
                "lower_bound_95": median_lower_bound(ratios),
                "pairs": ratios,
            }
    return row


def summary(runs: Sequence[Run], loads: Sequence[Load], sides: Iterable[Side]) -> list[dict[str, Any]]:
    """Return a row per load and side. Other sides are compared with direct load, the gateway with all."""
    direct = [side for side in sides if side is Side.DIRECT]
    others = [side for side in sides if side is not Side.GATEWAY]
    references: dict[Side, Sequence[Side]] = {Side.DIRECT: [], Side.GATEWAY: others, Side.VLLM_ROUTER: direct}
    return [summarise(runs, load.name, side, references[side]) for load in loads for side in sides]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the summary as text."""
    references = [side for side in Side if any(side in row["ratios"] for row in rows)]
    cells = [
        ["load", "side", "pairs", "tokens/s", "latency p50/p99 s", *(f"vs {side}" for side in references),
         "middle CPU-s/Mtok", "cores", "client busy", "errors"],
        *(_cells(row, references) for row in rows),
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _cells(row: dict[str, Any], references: Sequence[Side]) -> list[str]:
    return [
        row["load"],
        row["side"],
        str(row["pairs"]),
        f"{row['tokens_per_s']:.0f}",
        f"{row['median_latency_s']:.2f}/{row['p99_latency_s']:.2f}",
        *(_ratio_cell(row["ratios"].get(side)) for side in references),
        f"{row['middle_cpu_s_per_million_tokens']:.2f}" if "middle_cores" in row else "-",
        f"{row['middle_cores']:.2f}" if "middle_cores" in row else "-",
        f"{row['client_busy']:.2f}",
        str(row["errors"]),
    ]


def _ratio_cell(ratio: dict[str, Any] | None) -> str:
    return f"{ratio['median']:.3f} >= {ratio['lower_bound_95']:.3f}" if ratio else "-"


def _say(run: Run) -> None:
    name = f"pair {run.pair + 1}" if run.pair >= 0 else "warm-up"
    text = f"{name}  {run.load:>8} {run.side:<16} {run.tokens_per_s:8.0f} tok/s {run.wall_s:7.2f} s"
    print(text, f"  {len(run.errors)} errors" if run.errors else "", file=sys.stderr, flush=True)
    for error in run.errors[:_ERRORS_SHOWN]:
        print("   ", error[:500], file=sys.stderr)


def _loads(args: argparse.Namespace) -> list[Load]:
    def load(name: str, streams: int, prompts: int, samples: int, *, is_batch: bool) -> Load:
        workload = Workload(
            prompts=prompts,
            samples=samples,
            prompt_tokens=args.prompt_tokens,
            max_tokens=args.max_tokens,
            model=args.model,
        )
        return Load(name=name, streams=streams, is_batch=is_batch, rounds=args.rounds, workload=workload)

    batches = map(parse_batch, args.batch)
    return [
        *(load(str(streams), streams, 1, 1, is_batch=False) for streams in args.streams),
        *(load(f"{prompts}x{n}", 1, prompts, n, is_batch=True) for prompts, n in batches),
    ]


def _report(comparison: Comparison, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpus": os.cpu_count(),
        "python": sys.version.split()[0],
        "engines": len(comparison.engines),
        "clients": args.clients,
        "prompt_tokens": str(args.prompt_tokens),
        "max_tokens": args.max_tokens,
        "rounds": args.rounds,
        "summary": summary(comparison.runs, comparison.loads, comparison.sides),
        "runs": [{**dataclasses.asdict(run), "errors": run.errors[:_ERRORS_SHOWN]} for run in comparison.runs],
    }


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.studies.compare", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gateway", required=True, metavar="URL")
    add("--gateway-pid", type=int, metavar="PID", help="the gateway's process, to measure its CPU time")
    add("--engine", nargs="+", action="extend", required=True, metavar="URL", help="the gateway's engines")
    words = "its command, where it is installed; or VLLM_ROUTER in the environment"
    add("--vllm-router", default=os.environ.get("VLLM_ROUTER", ""), metavar="COMMAND", help=words)
    add("--streams", type=int, nargs="*", default=[], metavar="N", help="loads of N single streams per engine")
    add(
        "--batch", nargs="*", default=[], metavar="PxN", help="loads of one request of P prompts x N samples per engine"
    )
    add("--prompt-tokens", type=LengthMix.parse, default=LengthMix.parse("256"), help="256, or a mix: 128*3,1024*1")
    add("--max-tokens", type=int, default=256)
    add("--rounds", type=int, default=1, help="sequential requests of each stream in a run")
    add("--pairs", type=int, default=5)
    add("--sides", nargs="+", type=Side, default=[Side.DIRECT, Side.GATEWAY], choices=list(Side))
    add("--model", default="", help="model name; default: the server's")
    add("--clients", type=int, default=2, metavar="N", help="client processes")
    add("--timeout-s", type=float, default=300.0, help="limit on a run")
    add("--json", type=Path, metavar="FILE", help="write every run and the summary")
    args = parser.parse_args(argv)
    if not args.streams and not args.batch:
        args.streams = [64]
    if Side.VLLM_ROUTER in args.sides and not args.vllm_router:
        print("vllm-router is left out: give its command as --vllm-router or VLLM_ROUTER", file=sys.stderr)
        args.sides.remove(Side.VLLM_ROUTER)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse_arguments(argv)
    # Routers must end with this process, also on SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sides: Sides = dict.fromkeys(args.sides)
    with contextlib.ExitStack() as stack:
        if Side.GATEWAY in sides:
            sides[Side.GATEWAY] = Middle(args.gateway, args.gateway_pid)
        if Side.VLLM_ROUTER in sides:
            try:
                sides[Side.VLLM_ROUTER] = Middle(*stack.enter_context(running_router(args.vllm_router, args.engine)))
            except RouterFailed as error:
                print(error, file=sys.stderr)
                return 2
        clients = stack.enter_context(ClientPool(args.clients, args.timeout_s))
        comparison = Comparison(sides, args.engine, _loads(args), clients)
        if not comparison.warm_up():
            print("a side delivered nothing: there is nothing to compare", file=sys.stderr)
            return 1
        for pair in range(args.pairs):
            comparison.measure_pair(pair)
            # After each pair, so that an interrupted run keeps its results.
            if args.json:
                args.json.write_bytes(orjson.dumps(_report(comparison, args), option=orjson.OPT_INDENT_2))
    rows = summary(comparison.runs, comparison.loads, comparison.sides)
    print(table(rows))
    if any(row["client_busy"] > _BUSY_CLIENT for row in rows):
        print("a client process was nearly always busy: take more --clients", file=sys.stderr)
    return 1 if not rows or any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
