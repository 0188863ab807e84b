"""Throughput and CPU of gateways of one and of several processes (`gateway.workers`) over recorded replies.

    python -m loadtests.studies.gateway_cost.workers [--workers 1 2 4] [--rounds 5] [--rows "single 64/64"]

All gateways run beside each other and take turns, in alternating order. CPU seconds are those of the owner, which is
the whole gateway where there are no workers, and of all workers. The bound is what the CPU allows, with a core for each
process: a gateway is as fast as its busiest process. The time of a round says how fast it was here; client and engine
are processes of their own, so it means something where there are more cores than processes.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
import psutil

from gateway.config.schema import Config
from loadtests.studies.gateway_cost import canned_engine
from loadtests.studies.gateway_cost.gateway_cpu import (
    ROWS,
    Load,
    Row,
    recorded_from,
    run_gateway,
    studied_config,
)
from loadtests.studies.gateway_cost.own_process import Served, own_process

_TIMEOUT_S = 300.0
_WORKER = "gateway.http.workers.process"


@dataclass(slots=True)
class Costs:
    """CPU seconds a request, of the owner and of each worker, and requests a second; one of each a round."""

    owner: list[float] = field(default_factory=list)
    workers: list[list[float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    @property
    def owner_s(self) -> float:
        return statistics.median(self.owner)

    @property
    def workers_s(self) -> float:
        """Of all workers together."""
        return statistics.median(map(sum, self.workers))

    @property
    def bound(self) -> float:
        """Requests a second of the busiest process, at the spread of the rounds."""
        busiest = (max(owner, *each) if each else owner for owner, each in zip(self.owner, self.workers, strict=True))
        return 1 / statistics.median(busiest)


class DistinctLoad(Load):
    """Sends no two equal bodies: equal batches of one client run in one process."""

    _sent = 0

    async def _ask(self, url: str, data: bytes) -> None:
        self._sent += 1
        await super()._ask(url, data + b" " * self._sent)


def workers_of(gateway: Served) -> list[Served]:
    """The workers of a gateway's process."""
    children = psutil.Process(gateway.pid).children(recursive=True)
    return [Served(gateway.url, child.pid) for child in children if _WORKER in child.cmdline()]


async def measured(gateways: dict[int, Served], rows: Sequence[Row], rounds: int) -> dict[str, dict[int, Costs]]:
    """Measure all rows on gateways, by their number of workers; a first round without record warms all up."""
    workers = {number: workers_of(gateway) for number, gateway in gateways.items()}
    costs = {row.name: {number: Costs() for number in gateways} for row in rows}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    for row in rows:
        for turn in range(rounds + 1):
            for number in gateways if turn % 2 else reversed(list(gateways)):
                # New connections each time: a gateway spreads them over its workers as they come.
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
                    before, began = [worker.cpu_s for worker in workers[number]], time.monotonic()
                    owner = await DistinctLoad(session).seconds_a_request(gateways[number], row)
                    elapsed = time.monotonic() - began
                if turn:
                    one = costs[row.name][number]
                    one.owner.append(owner)
                    one.workers.append(
                        [
                            (worker.cpu_s - cpu_s) / row.requests
                            for worker, cpu_s in zip(workers[number], before, strict=True)
                        ]
                    )
                    one.rates.append(row.requests / elapsed)
    return costs


def table(costs: dict[str, dict[int, Costs]]) -> str:
    """Return microseconds a request, requests a second, and both over those of one process, as a table of Markdown."""
    lines = [
        ["case", "workers", "owner, us", "workers, us", "bound, requests/s", "x", "measured, requests/s", "x"],
        ["---"] * 8,
    ]
    for row, by_number in costs.items():
        first = next(iter(by_number.values()))
        base, base_rate = first.bound, statistics.median(first.rates)
        for number, one in by_number.items():
            rate = statistics.median(one.rates)
            figures = [f"{one.owner_s * 1e6:,.0f}", f"{one.workers_s * 1e6:,.0f}", f"{one.bound:,.0f}"]
            ratios = [f"{one.bound / base:.2f}", f"{rate:,.0f}", f"{rate / base_rate:.2f}"]
            lines.append([row, str(number), *figures, *ratios])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gateway_with(config: Config, workers: int) -> Config:
    """Without a ledger, so that batches run in workers too."""
    return config.model_copy(update={"gateway": config.gateway.model_copy(update={"workers": workers, "ledger": None})})


async def _run(args: argparse.Namespace) -> dict[str, dict[int, Costs]]:
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
            rows = [row for row in ROWS if not args.rows or row.name in args.rows]
            return await measured(gateways, rows, args.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.gateway_cost.workers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="the first is the base")
    parser.add_argument("--engines", type=int, default=1, help="processes of recorded replies")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="*", choices=[row.name for row in ROWS], help="default: all")
    parser.add_argument("--json", type=Path, help="file for all rounds")
    args = parser.parse_args()
    costs = asyncio.run(_run(args))
    print(table(costs))
    if args.json:
        rounds = {
            row: {str(number): dataclasses.asdict(one) for number, one in by.items()} for row, by in costs.items()
        }
        args.json.write_bytes(orjson.dumps(rounds, option=orjson.OPT_INDENT_2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
