"""The chaos campaign: injects all known faults into a fleet and counts lost rollouts: `make chaos`.

    python -m loadtests.chaos.campaign [--replicas 3] [--fleet 20] [--seconds 24] [--fault "replica killed"]
                              [--in-flight abort] [--json out.json]

Engines are simulated, so that every token can be checked (`clients/contents.py`). Each fault meets a healthy fleet
under load; before the next, the fleet must recover and take a new update on all replicas. There are two parts:

* Faults of weight updates (`faults.py`), on Ray Serve as in production, with `--replicas` engines. The weight store is
  a small mounted file system, to test a full disk. Without permission to mount that fault is skipped; or run
  `unshare --map-root-user --mount make chaos`.
* Faults of rollouts (`rollouts/`), on `--fleet` engines beside an undisturbed twin, whose
  goodput is the measure. Each lasts `--seconds`.

The last line is `lost N, duplicated N, stale N, wrong N, hung N`; the exit status is 1 if a count is not 0, a rollout
of the second part failed, or a fleet did not recover.
"""

import argparse
import asyncio
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from engines.config import SimConfig
from engines.process.port import free_port
from engines.types import InFlight
from gateway.cli.cluster.ray_head import SERVE_ENVIRONMENT
from gateway.config.schema import Config
from loadtests.chaos.clients.tally import Tally
from loadtests.chaos.clients.witness import Witness
from loadtests.chaos.faults import DISK_FULL, FAULTS, CallFailed, Hung, Newest, Trainer, World, until
from loadtests.chaos.rollouts.fleets import OF_ROLLOUTS, hurt_rollouts, report
from loadtests.chaos.rollouts.fleets import Outcome as RolloutOutcome

_SIM = SimConfig(load_s=0.3, decode_step_s=0.004)
_CLIENTS = 4
_BOUND_S = 60.0
_UP_S = 120.0
_DISK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one fault: the longest time without a delivery, seconds until all replicas held a new version, and
    the clients' tally."""

    fault: str
    silence_s: float
    whole_again_s: float
    tally: Tally
    problem: str = ""


@contextmanager
def small_disk() -> Iterator[Path | None]:
    """Mount a file system of 1 MiB; None without permission."""
    with tempfile.TemporaryDirectory(prefix="chaos-store-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=700", "tmpfs", folder]
        if subprocess.run(mount, capture_output=True).returncode != 0:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def chaos_config(replicas: int, store: Path | None, in_flight: InFlight = InFlight.KEEP) -> Config:
    """Return the configuration, with short probe intervals, so that a run takes minutes, and a fixed port for
    restarts."""
    return Config.model_validate(
        {
            "name": "chaos",
            "engine": {
                "kind": "sim", "model": "sim", "num_replicas": replicas, "num_cpus": 0.1, "stop_timeout_s": 1,
                "sim": _SIM.model_dump(),
            },
            "gateway": {
                "port": free_port(), "queue_timeout_s": _BOUND_S / 2, "generate_timeout_s": _BOUND_S / 2,
            },
            "fleet": {"discover_interval_s": 0.2, "probe_interval_s": 0.2, "probe_timeout_s": 2, "lost_after_s": 4},
            "weights": {
                "store": str(store) if store else "auto", "in_flight": in_flight, "init_timeout_s": 10,
                "drain_timeout_s": 20, "transfer_timeout_s": 10, "control_timeout_s": 10,
                "idle_timeout_s": 4,
            },
        }
    )  # fmt: skip


@contextmanager
def running(config: Config) -> Iterator[str]:
    """Run the application on its own Ray; yield the rollout URL."""
    import ray
    from ray import serve

    from gateway.app import build

    os.environ |= {**SERVE_ENVIRONMENT, **os.environ}
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
        serve.run(build(config), name=config.name)
        yield f"http://127.0.0.1:{config.gateway.port}"
    finally:
        serve.shutdown()
        ray.shutdown()


async def hurt(url: str, replicas: int, faults: Sequence[str]) -> list[Outcome]:
    """Inject every fault in turn, each into a healthy fleet."""
    newest = Newest()
    witness = Witness(url, _SIM, newest, num_clients=_CLIENTS, bound_s=_BOUND_S)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_BOUND_S)) as session:
        world = World(url, Trainer(url, newest, session), replicas)
        await until(world.serves, _UP_S, "the fleet to come up")
        outcomes = []
        for name in faults:
            outcomes.append(await _meet(name, world, witness))
            _say(outcomes[-1])
            if outcomes[-1].problem:
                break  # the next fault has to meet a whole fleet
        return outcomes


async def _meet(name: str, world: World, witness: Witness) -> Outcome:
    witness.watch()
    problem, hung, whole_again_s = "", 0, float("nan")
    try:
        await world.trainer.join()
        await world.trainer.update()
        witness.hurt_now()
        hurt_at = time.monotonic()
        await FAULTS[name](world)
        await until(world.updated, _UP_S, "an update on all replicas after the fault")
        whole_again_s = time.monotonic() - hurt_at
    except Hung as error:
        problem, hung = str(error), 1
    except CallFailed as error:
        problem = str(error)
    tally = await witness.seen()
    tally.hung += hung
    silence_s = witness.longest_silence_s
    return Outcome(fault=name, silence_s=silence_s, whole_again_s=whole_again_s, tally=tally, problem=problem)


def _say(outcome: Outcome) -> None:
    tally = outcome.tally
    times = f"silent {outcome.silence_s:5.1f} s  whole again {outcome.whole_again_s:5.1f} s"
    print(
        f"{outcome.fault:<40} {times}  {tally.delivered:5} delivered  {tally.failed} failed  {outcome.problem}",
        flush=True,
    )
    for reason in tally.reasons:
        print("   ", reason)


def _report(
    updates: Sequence[Outcome], rollouts: Sequence[RolloutOutcome], total: Tally, args: argparse.Namespace
) -> dict[str, Any]:
    return {
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "replicas": args.replicas,
        "fleet": args.fleet,
        "faults": [dataclasses.asdict(outcome) for outcome in updates],
        "rollout_faults": report(rollouts),
        "total": dataclasses.asdict(total) | {"reasons": []},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.chaos.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=3, help="engines on Ray Serve, for faults of updates")
    parser.add_argument("--fleet", type=int, default=20, help="engines for faults of rollouts; a twin has as many")
    parser.add_argument("--seconds", type=float, default=24.0, help="least length of a fault of rollouts")
    parser.add_argument(
        "--fault", action="append", choices=[*FAULTS, *OF_ROLLOUTS], help="only this fault; repeat for more"
    )
    parser.add_argument(
        "--in-flight", type=InFlight, choices=list(InFlight), default=InFlight.KEEP, help="weights.in_flight of updates"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes")
    args = parser.parse_args(argv)
    asked = args.fault or [*FAULTS, *OF_ROLLOUTS]
    of_updates, of_rollouts = (
        [name for name in asked if name in FAULTS],
        [name for name in asked if name in OF_ROLLOUTS],
    )
    rollouts = asyncio.run(hurt_rollouts(of_rollouts, args.fleet, args.seconds)) if of_rollouts else []
    updates, run = _hurt_updates(of_updates, args) if of_updates else ([], 0)
    total = Tally()
    for tally in [one.tally for one in updates] + [one.tally for one in rollouts]:
        total.add(tally)
    if args.json:
        args.json.write_bytes(orjson.dumps(_report(updates, rollouts, total, args), option=orjson.OPT_INDENT_2))
    print(f"{total.submitted} rollouts, {total.delivered} delivered, {total.failed} failed")
    print(
        f"lost {total.lost}, duplicated {total.duplicated}, stale {total.stale}, wrong {total.wrong}, hung {total.hung}"
    )
    is_whole = len(updates) == run and not any(outcome.problem for outcome in updates)
    is_right = len(rollouts) == len(of_rollouts) and all(outcome.is_right for outcome in rollouts)
    return 0 if total.is_clean and is_whole and is_right else 1


def _hurt_updates(faults: list[str], args: argparse.Namespace) -> tuple[list[Outcome], int]:
    """Return the outcomes of faults of updates on Ray Serve, and how many should be there."""
    with small_disk() as disk:
        if disk is None and DISK_FULL in faults:
            faults = [name for name in faults if name != DISK_FULL]
            print(f"not run: {DISK_FULL}, since this user may not mount a file system for it")
        with running(chaos_config(args.replicas, disk, args.in_flight)) as url:
            return asyncio.run(hurt(url, args.replicas, faults)), len(faults)


if __name__ == "__main__":
    sys.exit(main())
