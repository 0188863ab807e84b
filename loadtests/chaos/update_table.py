"""The table of faults in weight updates: each fault in each step of each transport, on simulated engines as processes.

    python -m loadtests.chaos.update_table [--transport store ...] [--fault "replica killed" ...] [--json FILE]

An engine holds the request of a step (`sim/faults.py`) until the fault has struck. Clients check every token
meanwhile. A row has what they lost, what the trainer saw, and how long it was until rollouts flowed again.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from engines.config import SimConfig
from gateway.config.schema import Config
from loadtests.chaos.clients.tally import Tally
from loadtests.chaos.clients.witness import Witness
from loadtests.chaos.faults import CallFailed, Hung, Newest, Trainer
from loadtests.chaos.process_fleet import WAITS, ProcessFleet, fleet_config
from loadtests.studies.weights.pusher import Pusher

Json = dict[str, Any]

_SIM = SimConfig(load_s=0.1, decode_step_s=0.004, stage_bytes=1 << 10)
_FAST: Json = {
    "fleet": {"discover_interval_s": 0.1, "probe_interval_s": 0.1, "probe_timeout_s": 1, "lost_after_s": 1.5},
    "weights": {
        "init_timeout_s": 60, "drain_timeout_s": 10, "transfer_timeout_s": 10, "control_timeout_s": 5,
        "load_timeout_s": 10, "idle_timeout_s": 20,
    },
}  # fmt: skip
_REPLICAS, _CLIENTS, _VICTIM = 3, 3, 0
_STOPPED_S = 2.5
"""Longer than `lost_after_s`, so that the replica is lost, and returns."""
_BOUND_S = 60.0
_MOMENT_S = 60.0
_WHOLE_S = 60.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Moment:
    """A step of an update. `held` is a text of the request that an engine holds in it."""

    step: str
    held: str


PAUSE, CANARY = Moment("pause", "/pause"), Moment("canary", "prompt_logprobs")
LOAD, PREPARE = Moment("load", "load_snapshot"), Moment("prepare", "prepare_snapshot")
DIGESTS, COMMIT = Moment("digests", "close_receipt"), Moment("commit", "/finish_weight_update")
BEGIN, RECEIPT = Moment("begin", "/start_weight_update"), Moment("receipt", "open_receipt")


@dataclass(frozen=True, slots=True)
class Transport:
    """A way to update with its steps; `weights` are the settings that choose it."""

    name: str
    moments: tuple[Moment, ...]
    weights: Json


TRANSPORTS = (
    Transport(
        "flat, staged",
        (RECEIPT, Moment("transfer", "stage_weights"), DIGESTS, PAUSE, Moment("load", "load_staged"), COMMIT, CANARY),
        {"relay": "never"},
    ),
    Transport(
        "flat, not staged",
        (PAUSE, BEGIN, Moment("transfer", "/update_weights"), DIGESTS, COMMIT, CANARY),
        {"relay": "never", "stage": "never"},
    ),
    Transport("store", (PREPARE, LOAD, CANARY), {"relay": "never"}),
    Transport("relay", (PREPARE, LOAD), {"relay": "always"}),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one fault in one step. `frozen` engines are paused at the end, and nobody holds them. With
    `by_next_update` a replica needed another update to serve again."""

    transport: str
    step: str
    fault: str
    stale: int
    mixed: int
    lost: int
    frozen: int
    trainer_saw: str
    flow_again_s: float
    whole_again_s: float
    by_next_update: bool
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return not (self.stale or self.mixed or self.lost or self.frozen or self.problem)


class Scene:
    """The fleet, its clients and a trainer."""

    def __init__(self, fleet: ProcessFleet, config: Config, session: aiohttp.ClientSession) -> None:
        self.fleet = fleet
        self.session = session
        self.newest = Newest()
        self.witness = Witness(fleet.url, _SIM, self.newest, num_clients=_CLIENTS, bound_s=_BOUND_S)
        self.trainer = Trainer(fleet.url, self.newest, session)
        self._config = config
        self._pusher: Pusher | None = None

    async def use(self, transport: Transport) -> None:
        """Have a gateway with the settings of this transport."""
        weights = self._config.weights.model_copy(update=transport.weights)
        self.fleet.restart_gateway(self._config.model_copy(update={"weights": weights}))
        await asyncio.sleep(_LOOK_S)
        await self._whole_within(_WHOLE_S)
        await self.push(transport)  # a trainer and a relay take their time to start

    async def whole(self) -> bool:
        """Return when all replicas serve, and no update is open; True where that needed another update."""
        async with asyncio.timeout(_WHOLE_S):
            await self.fleet.complete()
            while await self._status() is None:  # noqa: ASYNC110 it is another process
                await asyncio.sleep(_LOOK_S)
            while not await self._is_whole():
                if await self._waits_for_an_update():
                    break
                await asyncio.sleep(_LOOK_S)
            else:
                return False
        await self.trainer.push()
        await self._whole_within(_WHOLE_S)
        return True

    async def _whole_within(self, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not await self._is_whole():  # noqa: ASYNC110 it is another process
                await asyncio.sleep(_LOOK_S)

    async def _waits_for_an_update(self) -> bool:
        """Return True if a replica's version has died with its scribe."""
        status = await self._status()
        return any(WAITS in replica["reason"] for replica in (status or {"replicas": []})["replicas"])

    async def _is_whole(self) -> bool:
        if (status := await self._status()) is None:
            return False
        states = [replica["state"] for replica in status["replicas"]]
        pids = {info.pid for info in self.fleet.infos.values()}
        is_idle = not (status["weight_update"] or status["gate_closed_for"])
        return is_idle and states == ["SERVING"] * _REPLICAS and pids == {one["pid"] for one in status["replicas"]}

    async def _status(self) -> Json | None:
        try:
            return await self.trainer.call("GET", "/status")
        except (CallFailed, Hung):
            return None

    async def frozen(self) -> int:
        """Return the number of engines that are paused."""
        urls = [info.url for info in self.fleet.infos.values()]
        answers = await asyncio.gather(*(self.trainer.call("GET", "/is_paused", url=url) for url in urls))
        return sum(answer["is_paused"] for answer in answers)

    @asynccontextmanager
    async def held(self, moment: Moment) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
        """Have the victim hold the requests of a step during the block. Yields the question if it holds one."""
        url = self.fleet.infos[_VICTIM].url

        async def put(faults: Json) -> Json:
            return await self.trainer.call("PUT", "/faults", faults, url=url)

        async def holds() -> bool:
            return bool((await put({"held": moment.held}))["num_held"])

        await put({"held": moment.held})
        try:
            yield holds
        finally:
            with contextlib.suppress(CallFailed):  # it was killed
                await put({})

    async def push(self, transport: Transport) -> str:
        """Push as a trainer; return what it saw."""
        try:
            if transport.name == "relay":
                return await self._push_relayed()
            if transport.name == "store":
                await self.trainer.push()
            else:
                await self._push_group()
        except CallFailed as error:
            return f"{error.status}" if error.status else "no connection"
        return "200"

    async def _push_relayed(self) -> str:
        """Push from a process of its own: the relay receives real tensors."""
        if self._pusher is None:
            self._pusher = await asyncio.to_thread(Pusher, self.fleet.url, "gloo", "cpu", _BOUND_S)
        try:
            pushed = await asyncio.to_thread(self._pusher.push)
        except EOFError:
            return "-"
        self.newest.version = max(self.newest.version, pushed.version)
        return pushed.error.partition(":")[0] or "200"

    def kill_trainer(self) -> None:
        """End a trainer that is a process."""
        pusher, self._pusher = self._pusher, None
        if pusher is not None:
            pusher.kill()

    async def _push_group(self) -> None:
        await self.trainer.join()
        await self.trainer.start()
        await self.trainer.send()
        await self.trainer.finish()


Fault = Callable[[Scene, "asyncio.Task[str]"], Awaitable[None]]


async def replica_killed(scene: Scene, pushing: "asyncio.Task[str]") -> None:
    await scene.fleet.kill(_VICTIM)


async def replica_stopped(scene: Scene, pushing: "asyncio.Task[str]") -> None:
    await scene.fleet.suspend(_VICTIM)
    await asyncio.sleep(_STOPPED_S)
    scene.fleet.go_on()


async def gateway_killed(scene: Scene, pushing: "asyncio.Task[str]") -> None:
    scene.fleet.kill_gateway()


async def trainer_killed(scene: Scene, pushing: "asyncio.Task[str]") -> None:
    scene.kill_trainer()
    pushing.cancel()


FAULTS: dict[str, Fault] = {
    "replica killed": replica_killed,
    "replica stopped": replica_stopped,
    "gateway killed": gateway_killed,
    "trainer killed": trainer_killed,
}


async def meet(scene: Scene, transport: Transport, moment: Moment, fault: str) -> Row:
    """Let one fault strike in one step, and wait until the fleet is whole again."""
    witness = scene.witness
    witness.watch()
    problem, saw, whole_again_s, struck_at, by_next = "", "", float("nan"), time.monotonic(), False
    pushing = asyncio.create_task(scene.push(transport))
    try:
        async with scene.held(moment) as holds, asyncio.timeout(_MOMENT_S):
            while not await holds():
                if pushing.done():
                    raise CallFailed(moment.step, 0, f"the update passed it: {await pushing}")
                await asyncio.sleep(_LOOK_S)
            witness.hurt_now()
            struck_at = time.monotonic()
            await FAULTS[fault](scene, pushing)
        saw = await _seen(pushing)
        by_next = await scene.whole()
        whole_again_s = time.monotonic() - struck_at
    except (CallFailed, Hung, TimeoutError) as error:
        problem = f"{type(error).__name__} {error}"
    finally:
        pushing.cancel()
    tally: Tally = await witness.seen()
    return Row(
        transport.name, moment.step, fault, tally.stale, tally.wrong, tally.lost + tally.hung + tally.failed,
        await scene.frozen(), saw, round(witness.longest_silence_s, 2), round(whole_again_s, 2), by_next,
        problem or "; ".join(tally.reasons),
    )  # fmt: skip


async def _seen(pushing: "asyncio.Task[str]") -> str:
    try:
        return await pushing
    except asyncio.CancelledError:
        return "-"


@contextmanager
def table_config() -> Iterator[tuple[Config, Path]]:
    """Yield a configuration with short intervals, so that the table takes minutes, and its folder."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None, prefix="chaos-table-") as folder:
        config = fleet_config("table", _REPLICAS, _SIM, Path(folder), queue_timeout_s=_BOUND_S)
        fast = _FAST | {"weights": _FAST["weights"] | {"store": f"{folder}/store"}}
        tree = config.model_dump() | {part: {**config.model_dump()[part], **more} for part, more in fast.items()}
        yield Config.model_validate(tree), Path(folder)


async def measured(transports: Sequence[Transport], faults: Sequence[str]) -> list[Row]:
    """Return a row for each fault in each step; the first that left the fleet hurt is the last."""
    rows: list[Row] = []
    with table_config() as (config, folder):
        fleet = ProcessFleet(config, folder)
        timeout = aiohttp.ClientTimeout(total=_BOUND_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            scene = Scene(fleet, config, session)
            try:
                await fleet.start()
                for transport in transports:
                    await scene.use(transport)
                    for moment in transport.moments:
                        for fault in faults:
                            rows.append(await meet(scene, transport, moment, fault))
                            print(line(rows[-1]), flush=True)
            finally:
                scene.kill_trainer()
                await fleet.stop()
    return rows


def line(row: Row) -> str:
    counts = f"stale {row.stale} mixed {row.mixed} lost {row.lost} frozen {row.frozen}"
    times = f"flow again {row.flow_again_s:5.2f} s, whole {row.whole_again_s:5.2f} s"
    where = f"{row.transport:<17} {row.step:<9} {row.fault:<16}"
    return f"{where} {counts}  trainer {row.trainer_saw:<14} {times} {row.problem}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the table. The exit status is 1 where a token was wrong, a rollout lost, or an engine left frozen."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.chaos.update_table", description=(__doc__ or "").splitlines()[0]
    )
    names = [transport.name for transport in TRANSPORTS]
    parser.add_argument("--transport", action="append", choices=names, help="only this transport; repeat for more")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only this fault; repeat for more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    args = parser.parse_args(argv)
    transports = [transport for transport in TRANSPORTS if transport.name in (args.transport or names)]
    began = time.monotonic()
    rows = asyncio.run(measured(transports, args.fault or list(FAULTS)))
    report = {
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - began),
        "cpus": os.cpu_count(),
        "replicas": _REPLICAS,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    if args.json:
        args.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    wrong = [row for row in rows if not row.is_right]
    print(f"{len(rows)} faults in {report['seconds']} s, {len(wrong)} of them with a finding")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
