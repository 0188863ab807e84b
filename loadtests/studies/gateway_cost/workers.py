"""Throughput and CPU of gateways of one and of several processes (`gateway.workers`) over recorded replies.

    python -m loadtests.studies.gateway_cost.workers [--workers 1 2 4] [--clients 4] [--engines 2] [--rounds 5]

All gateways run beside each other and take turns, in alternating order; a round lasts `--seconds`. The CPU is that of
the owner, which is the whole gateway where there are no workers, and of all workers. The bound is what the CPU allows,
with a core for each process: a gateway is as fast as its busiest process. The measured speed means something where
there are more cores than busy processes, and where no client and no engine is near a whole core: the last columns have
the share of a core that each process took.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import psutil

from gateway.config.schema import Config
from loadtests.studies.compare import process_cpu_s
from loadtests.studies.gateway_cost import canned_engine
from loadtests.studies.gateway_cost.gateway_cpu import (
    ROWS,
    Row,
    recorded_from,
    run_gateway,
    studied_config,
)
from loadtests.studies.gateway_cost.load_processes import LoadProcesses
from loadtests.studies.gateway_cost.own_process import Served, own_process
from loadtests.studies.ratios import pair_ratios

_WORKER = "gateway.http.workers.process"
_HEAD = (
    "case", "workers", "owner, us", "workers, us", "bound, requests/s", "x", "measured, requests/s", "x",
    "owner, of a core", "each worker", "each client", "each engine",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Requests answered in a time, and the CPU seconds of each process in it."""

    requests: int
    seconds: float
    owner: float
    workers: list[float]
    clients: list[float]
    engines: list[float]

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    @property
    def bound(self) -> float:
        """Requests a second of the busiest process of the gateway, had it all of a core."""
        return self.requests / max(self.owner, *self.workers, 1e-9)


Rounds = dict[str, dict[int, list[Round]]]
"""The rounds of each row, by the number of workers."""


@dataclass(frozen=True, slots=True)
class Bench:
    """All processes of the study."""

    gateways: Mapping[int, Served]
    load: LoadProcesses
    engines: Sequence[int]

    def measured(self, rows: Sequence[Row], rounds: int, seconds: float) -> Rounds:
        """Measure all rows on all gateways; a first round without record warms all up."""
        workers = {number: workers_of(gateway) for number, gateway in self.gateways.items()}
        found: Rounds = {row.name: {number: [] for number in self.gateways} for row in rows}
        for row in rows:
            for turn in range(rounds + 1):
                for number in self.gateways if turn % 2 else reversed(list(self.gateways)):
                    one = self._round(self.gateways[number], workers[number], row, seconds)
                    if turn:
                        found[row.name][number].append(one)
        return found

    def _round(self, gateway: Served, workers: Sequence[int], row: Row, seconds: float) -> Round:
        groups = ([gateway.pid], workers, self.load.pids, self.engines)
        before = [cpu_of(pids) for pids in groups]
        requests, elapsed = self.load.run(gateway.url, row, seconds)
        used = [
            [after - first for after, first in zip(cpu_of(pids), firsts, strict=True)]
            for pids, firsts in zip(groups, before, strict=True)
        ]
        (owner,), worked, clients, engines = used
        return Round(
            requests=requests, seconds=elapsed, owner=owner, workers=worked, clients=clients, engines=engines
        )  # fmt: skip


def cpu_of(pids: Sequence[int]) -> list[float]:
    """Return CPU seconds of processes since their start."""
    return [process_cpu_s(pid) for pid in pids]


def workers_of(gateway: Served) -> list[int]:
    """Return the processes of a gateway's workers."""
    children = psutil.Process(gateway.pid).children(recursive=True)
    return [child.pid for child in children if _WORKER in child.cmdline()]


def table(found: Rounds) -> str:
    """Return medians of all rounds as a table of Markdown; speeds are also given over those of the first gateway."""
    lines: list[Sequence[str]] = [_HEAD, ["---"] * len(_HEAD)]
    for row, by_number in found.items():
        base = next(iter(by_number.values()))
        lines += [[row, str(number), *_cells(rounds, base)] for number, rounds in by_number.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(rounds: Sequence[Round], base: Sequence[Round]) -> list[str]:
    bounds, rates = ([[read(one) for one in each] for each in (rounds, base)] for read in (_bound, _rate))
    measured = pair_ratios(*rates)
    return [
        f"{_median(rounds, lambda one: one.owner / one.requests) * 1e6:,.0f}",
        f"{_median(rounds, lambda one: sum(one.workers) / one.requests) * 1e6:,.0f}",
        f"{statistics.median(bounds[0]):,.0f}",
        f"{statistics.median(pair_ratios(*bounds)):.2f}",
        f"{statistics.median(rates[0]):,.0f}",
        f"{statistics.median(measured):.2f} ({min(measured):.2f} to {max(measured):.2f})",
        f"{_median(rounds, lambda one: one.owner / one.seconds):.2f}",
        *(_span(rounds, part) for part in ("workers", "clients", "engines")),
    ]


def _bound(one: Round) -> float:
    return one.bound


def _rate(one: Round) -> float:
    return one.rate


def _median(rounds: Sequence[Round], read: Callable[[Round], float]) -> float:
    return statistics.median(map(read, rounds))


def _span(rounds: Sequence[Round], part: str) -> str:
    """Return the shares of a core of the idlest and the busiest process of a part."""
    shares = [[used / one.seconds for used in getattr(one, part)] for one in rounds]
    if not shares[0]:
        return ""
    return f"{statistics.median(map(min, shares)):.2f} to {statistics.median(map(max, shares)):.2f}"


def gateway_with(config: Config, workers: int) -> Config:
    """Without a ledger, so that batches run in workers too."""
    return config.model_copy(update={"gateway": config.gateway.model_copy(update={"workers": workers, "ledger": None})})


async def _run(args: argparse.Namespace) -> Rounds:
    config = studied_config()
    async with recorded_from(config) as info:
        with contextlib.ExitStack() as stack:
            canned = [stack.enter_context(own_process(canned_engine.run, info.url, 0.0)) for _ in range(args.engines)]
            infos = [
                dataclasses.replace(info, url=one.url, replica_id=f"engine-{index}") for index, one in enumerate(canned)
            ]
            gateways = {
                number: stack.enter_context(own_process(run_gateway, gateway_with(config, number), infos))
                for number in args.workers
            }
            load = stack.enter_context(LoadProcesses(args.clients))
            rows = [row for row in ROWS if not args.rows or row.name in args.rows]
            bench = Bench(gateways, load, [one.pid for one in canned])
            return await asyncio.to_thread(bench.measured, rows, args.rounds, args.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.gateway_cost.workers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="the first is the base")
    parser.add_argument("--clients", type=int, default=1, metavar="N", help="processes that send requests")
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="processes of recorded replies")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round")
    parser.add_argument("--rows", nargs="*", choices=[row.name for row in ROWS], help="default: all")
    parser.add_argument("--json", type=Path, help="file for all rounds")
    args = parser.parse_args()
    found = asyncio.run(_run(args))
    print(table(found))
    if args.json:
        args.json.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
