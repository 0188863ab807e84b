"""kill -9 of a replica in each step of an update of real engines: what the trainer sees, and how soon all serve again.

    python -m loadtests.studies.weights.kills -c FILE.yaml [KEY=VALUE ...] --transport nccl --device cuda:3

Engines and gateway run as processes, and what dies is started again, as Serve does. The record of an undisturbed update
gives the middle of each step; the next updates meet a kill there, a step each. A step that is over before the kill
shows in the row: `reached` is the last step that the record of the killed update has. `loadtests.chaos.update_table` is
exact about steps, with simulated engines, which can be held in them.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from engines.errors import ConfigError, EngineStartFailed
from engines.process.port import free_port
from gateway.config.load import load as load_config
from loadtests.chaos.processes.process_fleet import WAITS, ProcessFleet, healthy_within
from loadtests.studies.weights.pusher import Pushed, Pusher
from loadtests.studies.weights.recovery import read_status

Json = dict[str, Any]

_LOOK_S = 0.005
_KEPT_S = 0.05


class NotWhole(Exception):
    """The fleet did not become whole in time; names the replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill. Times are seconds: of the push, and from the kill until all replicas serve the newest version.

    `saw` is the trainer's error, empty where its push came back with a version. With `by_next_update` a replica needed
    another update to serve again.
    """

    step: str
    reached: str
    saw: str
    push_s: float
    whole_s: float
    by_next_update: bool


def schedule(seconds: Mapping[str, float]) -> dict[str, float]:
    """The middle of each step, in seconds from the update's start, by the steps of its record in their order."""
    middles, began = {}, 0.0
    for step, lasted in seconds.items():
        middles[step] = began + lasted / 2
        began += lasted
    return middles


class Study:
    """Kills one replica of a fleet again and again."""

    def __init__(self, fleet: ProcessFleet, session: aiohttp.ClientSession, pusher: Pusher, limit_s: float) -> None:
        self._fleet = fleet
        self._session = session
        self._pusher = pusher
        self._limit_s = limit_s

    async def undisturbed(self) -> dict[str, float]:
        """Push twice, since a first update also joins the group; return the seconds of the second's steps."""
        for _ in range(2):
            pushed = await self._push()
            if pushed.error:
                raise NotWhole(f"an update without a kill failed: {pushed.error}")
        seconds: dict[str, float] = (await self._status())["last_weight_update"]["seconds"]
        return seconds

    async def kill_at(self, step: str, after_s: float, victim: int) -> Kill:
        """Push, and kill a replica so long after the update's start; wait until all serve again."""
        known = (await self._status())["last_weight_update"]["version"]
        began = time.monotonic()
        dead = self._fleet.infos[victim].pid
        pushing = asyncio.create_task(self._push())
        reached = await self._strike(pushing, known, after_s, victim)
        struck = time.monotonic()
        pushed = await pushing
        push_s = time.monotonic() - began
        by_next = await self._whole(dead)
        return Kill(
            step=step, reached=reached or await self._last_step(), saw=pushed.error.partition("\n")[0],
            push_s=round(push_s, 2), whole_s=round(time.monotonic() - struck, 2), by_next_update=by_next,
        )  # fmt: skip

    async def _strike(self, pushing: "asyncio.Task[Pushed]", known: int, after_s: float, victim: int) -> str:
        """Kill the replica; return "over" where the update had ended before."""
        while not pushing.done():
            update = (await self._status())["weight_update"]
            if update is not None and update["version"] > known:
                await asyncio.sleep(max(0.0, after_s - update["age_s"]))
                break
            await asyncio.sleep(_LOOK_S)
        is_over = (await self._status())["weight_update"] is None
        self._fleet.signal(victim, signal.SIGKILL)
        return "over" if is_over else ""

    async def _last_step(self) -> str:
        status = await self._status()
        return next(reversed((status["weight_update"] or status["last_weight_update"])["seconds"]), "open")

    async def _whole(self, dead: int) -> bool:
        """Return when all replicas and the successor of the dead process serve the newest version; True where that
        needed another update."""
        try:
            async with asyncio.timeout(self._limit_s):
                while not is_whole(status := await self._status(), self._fleet.size, dead):
                    if any(WAITS in replica["reason"] for replica in status["replicas"]):
                        await self._push()
                        await self._whole(dead)
                        return True
                    await asyncio.sleep(_KEPT_S)
        except TimeoutError as error:
            states = [(one["replica_id"], one["state"], one["reason"]) for one in (await self._status())["replicas"]]
            raise NotWhole(f"not all replicas served within {self._limit_s:g} s of a kill: {states}") from error
        return False

    async def _push(self) -> Pushed:
        return await asyncio.to_thread(self._pusher.push, "keep")

    async def _status(self) -> Json:
        return await read_status(self._session, self._fleet.url)


def is_whole(status: Json, size: int, dead: int) -> bool:
    """True if so many replicas, the dead process not among them, serve the newest version, and no update is open."""
    newest = status["weight_version"]
    serving = [one["pid"] for one in status["replicas"] if (one["state"], one["weight_version"]) == ("SERVING", newest)]
    is_idle = status["weight_update"] is None
    return is_idle and len(status["replicas"]) == len(serving) == size and dead not in serving


def line(kill: Kill) -> str:
    saw = kill.saw or "a version"
    more = ", by the next update" if kill.by_next_update else ""
    times = f"trainer saw {saw} after {kill.push_s:.2f} s, whole after {kill.whole_s:.2f} s"
    return f"{kill.step:<9} reached {kill.reached:<9} {times}{more}"


async def _measured(args: argparse.Namespace) -> list[Kill]:
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        settings = [f"gateway.port={free_port()}", f"gateway.ledger={folder}/ledger.sqlite", *args.overrides]
        fleet = ProcessFleet(load_config(args.config, settings), Path(folder))
        timeout = aiohttp.ClientTimeout(total=args.limit_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                await fleet.start()
                return await _killed(fleet, session, args)
            finally:
                await fleet.stop()


async def _killed(fleet: ProcessFleet, session: aiohttp.ClientSession, args: argparse.Namespace) -> list[Kill]:
    kills: list[Kill] = []
    await healthy_within(fleet.url, args.limit_s)
    with await asyncio.to_thread(Pusher, fleet.url, args.transport, args.device, args.limit_s) as pusher:
        study = Study(fleet, session, pusher, args.limit_s)
        for step, after_s in schedule(await study.undisturbed()).items():
            if not args.step or step in args.step:
                kills.append(await study.kill_at(step, after_s, args.victim))
                print(line(kills[-1]), flush=True)
    return kills


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study. The exit status is 1 if the fleet did not become whole after a kill."""
    args = _parse_arguments(argv)
    try:
        kills = asyncio.run(_measured(args))
    except (ConfigError, EngineStartFailed) as error:
        print(error, file=sys.stderr)
        return 2
    except NotWhole as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        args.json.write_bytes(orjson.dumps([asdict(kill) for kill in kills], option=orjson.OPT_INDENT_2))
    return 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.weights.kills", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("-c", "--config", type=Path, required=True, metavar="FILE")
    add("--transport", choices=("nccl", "gloo", "store"), required=True)
    add("--device", default="cpu", help="device of the trainer's tensors, such as cuda:3")
    add("--victim", type=int, default=0, help="number of the replica to kill")
    add("--step", action="append", metavar="STEP", help="only this step; repeat for more")
    add("--limit-s", type=float, default=600.0, help="limit on each wait")
    add("--json", type=Path, metavar="FILE")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the file's")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())
