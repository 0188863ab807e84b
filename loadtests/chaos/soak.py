"""A soak of a fleet: rollouts, weight updates and deaths for an hour. Does anything drift or leak?

    python -m loadtests.chaos.soak [--minutes 60] [--replicas 4] [--clients 4] [--update-every 10] [--kill-every 30]
                                   [--json out.json]

Engines are simulated, and every token is checked (`clients/witness.py`). The gateway's process is measured every two
seconds and compared between the second quarter of the run and the last: memory, descriptors, threads, tasks, and the
bytes of its weight store in /dev/shm. The exit status is 1 if a rollout was lost, duplicated, stale, wrong or failed,
or if something grew.
"""

import argparse
import asyncio
import dataclasses
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
import psutil

from engines.config import SimConfig
from gateway.weights.snapshots import in_memory
from loadtests.chaos.clients.tally import Tally
from loadtests.chaos.clients.witness import Witness
from loadtests.chaos.faults import CallFailed, Trainer
from loadtests.chaos.processes.process_fleet import ProcessFleet, fleet_config, healthy_within, running

_SIM = SimConfig(load_s=0.1, decode_step_s=0.01)
_BOUND_S = 120.0
_LOOK_S = 2.0
_TASKS = re.compile(rb"^rollout_gateway_tasks (\S+)$", re.MULTILINE)
_MOST_GROWTH = {
    "rss_mb": (1.1, 16.0),
    "descriptors": (1.1, 24.0),
    "threads": (1.0, 4.0),
    "tasks": (1.2, 40.0),
    "store_mb": (1.1, 1.0),
}
"""Growth that is no drift, as a factor and a sum: the larger bound holds."""


@dataclass(frozen=True, slots=True)
class Look:
    """The gateway's process at a moment. `at_s` counts from the start of the soak."""

    at_s: float
    rss_mb: float
    descriptors: int
    threads: int
    tasks: int
    store_mb: float


@dataclass(slots=True)
class Soak:
    """The result of a soak."""

    looks: list[Look]
    tally: Tally
    updates: int = 0
    updates_failed: int = 0
    kills: int = 0

    @property
    def is_clean(self) -> bool:
        return self.tally.is_clean and not self.tally.failed and not self.grown()

    def quarters(self, name: str) -> tuple[float, float]:
        """Return the median of a figure in the second quarter of the run and in the last."""
        end = self.looks[-1].at_s
        second = [getattr(look, name) for look in self.looks if 0.25 * end <= look.at_s < 0.5 * end]
        last = [getattr(look, name) for look in self.looks if look.at_s >= 0.75 * end]
        return statistics.median(second), statistics.median(last)

    def grown(self) -> list[str]:
        """Return a line for each figure that grew by more than its bound."""
        lines = []
        for name, (factor, sum_) in _MOST_GROWTH.items():
            before, after = self.quarters(name)
            if after > max(factor * before, before + sum_):
                lines.append(f"{name} grew from {before:g} to {after:g}")
        return lines


async def soak(seconds: float, replicas: int, clients: int, *, update_every_s: float, kill_every_s: float) -> Soak:
    """Run a fleet in processes of its own, under clients, updates and deaths."""
    result = Soak([], Tally())
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        config = fleet_config("soak", replicas, _SIM, Path(folder))
        fleet = ProcessFleet(config, Path(folder))
        witness = Witness(fleet.url, _SIM, num_clients=clients, bound_s=_BOUND_S)
        timeout = aiohttp.ClientTimeout(total=_BOUND_S)
        async with running(fleet), aiohttp.ClientSession(fleet.url, timeout=timeout) as session:
            await healthy_within(fleet.url, _BOUND_S)
            trainer = Trainer(fleet.url, witness, session)
            witness.watch()
            looks = _looks(fleet, session, in_memory(config.name), result)
            work = _updates(trainer, result, update_every_s), _kills(fleet, result, kill_every_s), looks
            tasks = [asyncio.create_task(one) for one in work]
            try:
                ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in ended:
                task.result()  # raises: none of them ends by itself
            result.tally = await witness.seen()
    return result


async def _updates(trainer: Trainer, result: Soak, every_s: float) -> None:
    """Push versions. An update that a death falls into may be refused; the next one has to bring all replicas on."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await trainer.push()
            result.updates += 1
        except CallFailed as error:
            result.updates_failed += 1
            print(f"update refused: {error}", flush=True)


async def _kills(fleet: ProcessFleet, result: Soak, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await fleet.complete()
        await fleet.kill(result.kills % fleet.size)
        result.kills += 1


async def _looks(fleet: ProcessFleet, session: aiohttp.ClientSession, store: Path, result: Soak) -> None:
    process, began = psutil.Process(fleet.gateway_pid), time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_S)
        tasks = await _tasks(session)
        with process.oneshot():
            rss, threads, descriptors = process.memory_info().rss, process.num_threads(), process.num_fds()
        size = await asyncio.to_thread(bytes_in, store)
        result.looks.append(Look(time.monotonic() - began, rss / 1e6, descriptors, threads, tasks, size / 1e6))


async def _tasks(session: aiohttp.ClientSession) -> int:
    async with session.get("/metrics") as response:
        found = _TASKS.search(await response.read())
    if found is None:
        raise CallFailed("/metrics", response.status, "no number of tasks")
    return int(float(found[1]))


def bytes_in(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):  # leaves out a folder that is removed under it
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(path, name)).st_size
    return total


def _print(result: Soak) -> None:
    tally = result.tally
    print(
        f"{result.looks[-1].at_s:.0f} s: {tally.delivered} delivered, {tally.failed} failed, "
        f"{result.updates} updates, {result.updates_failed} refused, {result.kills} engines killed"
    )
    for name in _MOST_GROWTH:
        before, after = result.quarters(name)
        print(f"{name:<12} second quarter {before:8.1f}   last quarter {after:8.1f}")
    for line in (*result.grown(), *tally.reasons):
        print(line)
    print(
        f"lost {tally.lost}, duplicated {tally.duplicated}, stale {tally.stale}, wrong {tally.wrong}, hung {tally.hung}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.chaos.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--update-every", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--kill-every", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    args = parser.parse_args(argv)
    every = {"update_every_s": args.update_every, "kill_every_s": args.kill_every}
    try:
        result = asyncio.run(soak(60 * args.minutes, args.replicas, args.clients, **every))
    except KeyboardInterrupt:
        print("interrupted: no result", file=sys.stderr)
        return 130
    _print(result)
    if args.json:
        args.json.write_bytes(orjson.dumps(dataclasses.asdict(result), option=orjson.OPT_INDENT_2))
    return 0 if result.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
