"""The time from kill -9 of an engine to the first completion of its successor, in parts.

    python -m loadtests.studies.weights.recovery --url http://127.0.0.1:8100 [--times 2] [--json out.json]

The fleet was started by `rollout-gateway up` on this machine, where Ray restarts replicas. The parts end when the
gateway's status shows them: the death is noticed, the new engine is up, it serves (weights loaded, canary passed), and
it has answered.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

Json = dict[str, Any]

_POLL_S = 0.02
_SERVING = "SERVING"


class NotRecovered(Exception):
    """The fleet did not recover; names the part reached."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds of each part, and in total. `version` made the first completion; `fleet_version` is the expected one."""

    replica: str
    noticed_s: float
    restarted_s: float
    loaded_s: float
    answered_s: float
    total_s: float
    version: int
    fleet_version: int


class Watch:
    """The status of a replica's death and of its successor. Times are seconds since the kill.

    `replicas` are all that there were.
    """

    def __init__(self, victim: Json, replicas: Sequence[Json]) -> None:
        self._victim = victim
        self._known = {one["pid"] for one in replicas}
        self.noticed: float | None = None
        self.restarted: float | None = None
        self.serving: float | None = None
        self.placed: float | None = None

    def see(self, replicas: Sequence[Json], now: float) -> None:
        """Read the status once."""
        old = next((one for one in replicas if one["pid"] == self._victim["pid"]), None)
        new = next((one for one in replicas if self._is_in_its_place(one)), None)
        if self.noticed is None and (old is None or old["state"] != _SERVING):
            self.noticed = now
        if new is None:
            return
        self.restarted = now if self.restarted is None else self.restarted
        if new["state"] == _SERVING:
            self.serving = now if self.serving is None else self.serving
            self.placed = now if self.placed is None and new["samples_placed"] else self.placed

    def _is_in_its_place(self, replica: Json) -> bool:
        """Find the successor: a restart has a new id, since Serve names each actor."""
        return replica["group"] == self._victim["group"] and replica["pid"] not in self._known


async def recover(session: aiohttp.ClientSession, url: str, replica_id: str, limit_s: float) -> Recovery:
    """Kill the engine of one replica and measure its recovery. Raise `NotRecovered` after `limit_s`."""
    status = await read_status(session, url)
    serving = [one for one in status["replicas"] if one["state"] == _SERVING and replica_id in ("", one["replica_id"])]
    if not serving:
        raise NotRecovered(f"replica {replica_id!r} does not serve: {[one['replica_id'] for one in serving]} do")
    victim = serving[0]
    watch, began = Watch(victim, status["replicas"]), time.monotonic()
    _kill(victim["pid"])
    try:
        async with asyncio.timeout(limit_s):
            while watch.placed is None:
                asked = asyncio.create_task(_complete(session, url))
                while not asked.done() or watch.noticed is None:
                    watch.see((await read_status(session, url))["replicas"], time.monotonic() - began)
                    await asyncio.sleep(_POLL_S)
                version, answered = await asked, time.monotonic() - began
                watch.see((await read_status(session, url))["replicas"], time.monotonic() - began)
    except TimeoutError as error:
        raise NotRecovered(f"{victim['replica_id']} was not replaced within {limit_s:g} s: {vars(watch)}") from error
    assert watch.noticed is not None
    assert watch.restarted is not None
    assert watch.serving is not None
    return Recovery(
        replica=victim["replica_id"],
        noticed_s=watch.noticed,
        restarted_s=watch.restarted - watch.noticed,
        loaded_s=watch.serving - watch.restarted,
        answered_s=max(0.0, answered - watch.serving),
        total_s=answered,
        version=version,
        fleet_version=status["weight_version"],
    )


def _kill(pid: int) -> None:
    """Return the processes to kill, owners first, so that none can clean up."""
    owner = psutil.Process(pid)
    for process in [owner, *owner.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it went with its parent
            process.kill()


async def read_status(session: aiohttp.ClientSession, url: str) -> Json:
    async with session.get(f"{url}/status") as reply:
        reply.raise_for_status()
        status: Json = await reply.json()
    return status


async def _complete(session: aiohttp.ClientSession, url: str) -> int:
    """Request one token, which may wait in the gateway's queue; return its version."""
    async with session.post(f"{url}/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 1}) as reply:
        reply.raise_for_status()
        version: int = (await reply.json())["choices"][0]["weight_versions"][-1]["version"]
    return version


def table(recoveries: Sequence[Recovery]) -> str:
    """Return the medians as text."""
    parts = ("noticed_s", "restarted_s", "loaded_s", "answered_s", "total_s")
    medians = {part: statistics.median(getattr(one, part) for one in recoveries) for part in parts}
    return ", ".join(f"{part.removesuffix('_s')} {seconds:.2f} s" for part, seconds in medians.items())


async def _measured(args: argparse.Namespace) -> list[Recovery]:
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    timeout = aiohttp.ClientTimeout(total=args.limit_s)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        return [await recover(session, args.url, args.replica, args.limit_s) for _ in range(args.times)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study. The exit status is 1 if a replica did not recover, or answered with other weights than the
    fleet's."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.weights.recovery", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--url", required=True, help="the gateway's URL")
    parser.add_argument("--key", default="", help="inference key, if the gateway has one")
    parser.add_argument("--replica", default="", help="replica to kill; default: the first that serves")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=600.0, help="limit on a recovery")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        recoveries = asyncio.run(_measured(args))
    except NotRecovered as error:
        print(error, file=sys.stderr)
        return 1
    print(table(recoveries))
    if args.json:
        args.json.write_bytes(orjson.dumps([asdict(one) for one in recoveries], option=orjson.OPT_INDENT_2))
    return int(any(one.version != one.fleet_version for one in recoveries))


if __name__ == "__main__":
    sys.exit(main())
