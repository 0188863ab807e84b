"""Side by side: the same load on engines driven directly and through the gateway, in alternating runs.

    python -m loadtests.compare --gateway http://127.0.0.1:8100 --gateway-pid 4711 \
        --engine http://127.0.0.1:8000 --engine http://127.0.0.1:8001 --streams 64 512 --batch 64x8 --json out.json

Loads are given per engine, so a fleet of four has four times the streams of a fleet of one. Each run has prompts of
its own: equal ones would be answered from the prefix cache of the run before.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from loadtests.clients import ClientPool, Outcome, Stream, total
from loadtests.ratios import median_lower_bound, pair_ratios
from loadtests.workloads import LengthMix, Workload, parse_batch

_BUSY_CLIENT = 0.8
_ERRORS_SHOWN = 5


class Side(StrEnum):
    """Who is driven, and how replies are read."""

    DIRECT = "direct"
    STREAMED = "streamed"  # directly, a chunk every `stream_interval` tokens
    GATEWAY = "gateway"
    GATEWAY_STREAMED = "gateway-streamed"

    @property
    def through_gateway(self) -> bool:
        return self in (Side.GATEWAY, Side.GATEWAY_STREAMED)

    @property
    def is_streamed(self) -> bool:
        return self in (Side.STREAMED, Side.GATEWAY_STREAMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Callers for each engine. A batch is one request with all prompts, as a trainer sends it."""

    name: str
    streams: int
    is_batch: bool
    rounds: int
    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is measured. `gateway_pid` is the process whose CPU time counts as the gateway's."""

    gateway: str
    engines: tuple[str, ...]
    gateway_pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One side of one pair."""

    load: str
    side: Side
    pair: int
    wall_s: float
    completions: int
    tokens: int
    median_latency_s: float
    p99_latency_s: float
    gateway_cpu_s: float | None
    client_busy: float
    errors: list[str]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


class Comparison:
    """Runs all loads on all sides, pair after pair, and keeps every run."""

    def __init__(self, targets: Targets, loads: Sequence[Load], sides: Sequence[Side], clients: ClientPool) -> None:
        self.targets = targets
        self.loads = loads
        self.sides = sides
        self.runs: list[Run] = []
        self._clients = clients

    def warm_up(self) -> None:
        """Engines compile and pools connect in their first run, which does not count."""
        for load in self.loads:
            for side in self.sides:
                _say(self._run(load, side, pair=-1))

    def measure_pair(self, pair: int) -> None:
        """Every side once for each load, in an order that turns round from pair to pair."""
        for load in self.loads:
            for side in self.sides if pair % 2 == 0 else reversed(self.sides):
                run = self._run(load, side, pair)
                _say(run)
                self.runs.append(run)

    def _run(self, load: Load, side: Side, pair: int) -> Run:
        streams = streams_of(load, side, self.targets, seed=f"{load.name} {side} {pair} {os.getpid()}")
        pid = self.targets.gateway_pid if side.through_gateway else None
        cpu = process_cpu_s(pid) if pid else None
        outcomes = self._clients.run(streams)
        used = process_cpu_s(pid) - cpu if pid and cpu is not None else None
        return _summed(outcomes, load, side, pair, used)


def streams_of(load: Load, side: Side, targets: Targets, seed: str) -> list[Stream]:
    """The callers of one run. Directly, they are dealt out over the engines; the gateway places them itself."""
    num_engines = len(targets.engines)
    num_streams, workload = load.streams * num_engines, load.workload
    if side.through_gateway and load.is_batch:
        num_streams, workload = 1, dataclasses.replace(workload, prompts=workload.prompts * num_engines)
    return [
        Stream(
            url=targets.gateway if side.through_gateway else targets.engines[index % num_engines],
            workload=workload,
            seeds=tuple(f"{seed} {index} {turn}" for turn in range(load.rounds)),
            stream=side.is_streamed,
        )
        for index in range(num_streams)
    ]


def process_cpu_s(pid: int) -> float:
    """User and system time of a process with all its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summarise(runs: Sequence[Run], load: str, side: Side, references: Sequence[Side]) -> dict[str, Any]:
    """Medians of one side under one load, and its ratio to each reference of the same pair."""
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
    if all(run.gateway_cpu_s is not None and run.tokens for run in ours):
        used = [(run.gateway_cpu_s or 0.0, run) for run in ours]
        row["gateway_cpu_s_per_million_tokens"] = statistics.median(cpu / run.tokens * 1e6 for cpu, run in used)
        row["gateway_cores"] = statistics.median(cpu / run.wall_s for cpu, run in used)
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


def summary(runs: Sequence[Run], loads: Sequence[Load], sides: Sequence[Side]) -> list[dict[str, Any]]:
    """A row for each load and side; the gateway's rows are set against the sides driven directly."""
    direct = [side for side in sides if not side.through_gateway]
    return [
        summarise(runs, load.name, side, direct if side.through_gateway else [])
        for load in loads
        for side in sides
        if any(run.load == load.name and run.side == side for run in runs)
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The summary for people."""
    cells = [
        ["load", "side", "pairs", "tokens/s", "latency p50/p99 s", "vs direct", "vs streamed", "gateway CPU-s/Mtok",
         "cores", "client busy", "errors"],
        *(_cells(row) for row in rows),
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["load"],
        row["side"],
        str(row["pairs"]),
        f"{row['tokens_per_s']:.0f}",
        f"{row['median_latency_s']:.2f}/{row['p99_latency_s']:.2f}",
        _ratio_cell(row["ratios"].get(Side.DIRECT)),
        _ratio_cell(row["ratios"].get(Side.STREAMED)),
        f"{row['gateway_cpu_s_per_million_tokens']:.2f}" if "gateway_cores" in row else "-",
        f"{row['gateway_cores']:.2f}" if "gateway_cores" in row else "-",
        f"{row['client_busy']:.2f}",
        str(row["errors"]),
    ]


def _ratio_cell(ratio: dict[str, Any] | None) -> str:
    return f"{ratio['median']:.3f} >= {ratio['lower_bound_95']:.3f}" if ratio else "-"


def _summed(outcomes: Sequence[Outcome], load: Load, side: Side, pair: int, gateway_cpu_s: float | None) -> Run:
    totals = dataclasses.asdict(total(outcomes))
    return Run(load=load.name, side=side, pair=pair, gateway_cpu_s=gateway_cpu_s, **totals)


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
        "label": args.label,
        "cpus": os.cpu_count(),
        "python": sys.version.split()[0],
        "engines": len(comparison.targets.engines),
        "clients": args.clients,
        "prompt_tokens": str(args.prompt_tokens),
        "max_tokens": args.max_tokens,
        "rounds": args.rounds,
        "summary": summary(comparison.runs, comparison.loads, comparison.sides),
        "runs": [{**dataclasses.asdict(run), "errors": run.errors[:_ERRORS_SHOWN]} for run in comparison.runs],
    }


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.compare", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gateway", required=True, metavar="URL")
    add("--gateway-pid", type=int, metavar="PID", help="its process, to count its CPU time")
    add("--engine", action="append", required=True, metavar="URL", help="an engine behind it; repeat for each")
    add("--streams", type=int, nargs="*", default=[], metavar="N", help="loads of N single streams for each engine")
    add("--batch", nargs="*", default=[], metavar="PxN", help="loads of one request of P prompts x N samples an engine")
    add("--prompt-tokens", type=LengthMix.parse, default=LengthMix.parse("256"), help="256, or a mix: 128*3,1024*1")
    add("--max-tokens", type=int, default=256)
    add("--rounds", type=int, default=1, help="requests of each stream in a run, one after the other")
    add("--pairs", type=int, default=5)
    add("--sides", nargs="+", type=Side, default=[Side.DIRECT, Side.GATEWAY, Side.STREAMED], choices=list(Side))
    add("--model", default="", help="name to ask for; the server's own unless given")
    add("--clients", type=int, default=2, metavar="N", help="client processes")
    add("--timeout-s", type=float, default=300.0, help="longest run")
    add("--budget-s", type=float, default=float("inf"), help="begin no further pair after this many seconds")
    add("--label", default="", help="what is measured, for the report")
    add("--json", type=Path, metavar="FILE", help="write every run and the summary")
    args = parser.parse_args(argv)
    if not args.streams and not args.batch:
        args.streams = [64]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse_arguments(argv)
    began = time.monotonic()
    targets = Targets(gateway=args.gateway, engines=tuple(args.engine), gateway_pid=args.gateway_pid)
    with ClientPool(args.clients, args.timeout_s) as clients:
        comparison = Comparison(targets, _loads(args), args.sides, clients)
        comparison.warm_up()
        for pair in range(args.pairs):
            if time.monotonic() - began > args.budget_s:
                print(f"stopped after {pair} pairs: {args.budget_s:g} s are over", file=sys.stderr)
                break
            comparison.measure_pair(pair)
            # After each pair, so that a run cut short leaves what it has.
            if args.json:
                args.json.write_bytes(orjson.dumps(_report(comparison, args), option=orjson.OPT_INDENT_2))
    rows = summary(comparison.runs, comparison.loads, comparison.sides)
    print(table(rows))
    if any(row["client_busy"] > _BUSY_CLIENT for row in rows):
        print("a client process was nearly always busy: take more --clients", file=sys.stderr)
    return 1 if not rows or any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
