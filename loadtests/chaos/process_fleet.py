"""A fleet of engines and a gateway as processes, without Ray: what dies is started again, as with Serve.

Twenty simulated replicas and their undisturbed twins fit on two cores, where Serve's own processes would take the
cores.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from pydantic import TypeAdapter

from engines.config import SimConfig
from engines.process.log_lines import write_log_lines
from engines.process.port import free_port
from engines.store.weight_store import remove_store
from engines.types import ReplicaInfo
from gateway.config.machine import visible_gpus
from gateway.config.schema import Config
from gateway.fleet.watch.engine_page import EngineLoad, read_load
from gateway.http.listener import Listener
from gateway.weights.snapshots import in_memory
from loadtests.fleet import replica_processes
from loadtests.own_process import OwnProcess, serving

WAITS = "waits for the next update"
"""A part of the reason of a replica whose version has died with the only copy."""

_REPLICAS = TypeAdapter(list[ReplicaInfo])
_PUBLISHED = "replicas.json"
_LOOK_S = 0.2
_STARTING_AT_ONCE = 4
_STOP_S = 15.0
_PAGE_TIMEOUT_S = 10.0
_NOISE = 0.3  # nats: the canary's log-probs depend on the batch beside it, as on GPUs (fp8 on H100)


def fleet_config(name: str, replicas: int, sim: SimConfig, folder: Path, **gateway: Any) -> Config:
    """Return the configuration: that of production, but for the simulated engine and a fixed port for restarts.

    `gateway` are further settings of the gateway.
    """
    return Config.model_validate(
        {
            "name": f"chaos-{name}-{os.getpid()}",
            "engine": {
                "kind": "sim", "model": "sim", "num_replicas": replicas, "num_cpus": 0.1, "stop_timeout_s": 1,
                "start_timeout_s": 120, "sim": sim.model_dump() | {"logprob_noise": _NOISE}, "log_dir": str(folder),
            },
            "gateway": {"port": free_port(), "ledger": str(folder / "ledger"), **gateway},
        }
    )  # fmt: skip


class ProcessFleet:
    """The processes of one fleet. `infos` lists the replicas that run, by their place; `deaths` counts the processes
    that ended."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{config.gateway.port}"
        self.size = config.engine.num_replicas
        self._config = config
        self._folder = folder
        self._replicas = replica_processes(config, visible_gpus())
        self.infos: dict[int, ReplicaInfo] = {}
        self._gateway: OwnProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.Semaphore(_STARTING_AT_ONCE)
        self._suspended: dict[int, float] = {}  # the tokens that each has made
        self._made_by_dead = 0.0
        self.deaths = 0
        self._complete = asyncio.Event()

    async def start(self) -> None:
        await asyncio.gather(*map(self._start_engine, range(self.size)))
        await self._start_gateway()
        keepers = [self._keep_engine(index) for index in range(self.size)]
        self._tasks = [asyncio.create_task(keeper) for keeper in (self._keep_gateway(), *keepers)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._gateway is not None:
            await self._gateway.stop(_STOP_S)
        await asyncio.gather(*(replica.stop() for replica in self._replicas))
        await asyncio.to_thread(remove_store, in_memory(self._config.name))

    @property
    def gateway_pid(self) -> int:
        assert self._gateway is not None
        return self._gateway.pid

    async def made(self) -> float:
        """Return the tokens that all engines have made so far, those of dead engines included."""
        return sum(await asyncio.gather(*map(self.made_by, self.infos))) + self._made_by_dead

    async def made_by(self, index: int) -> float:
        return (await self.load_of(index)).generated

    async def load_of(self, index: int) -> EngineLoad:
        timeout = aiohttp.ClientTimeout(total=_PAGE_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(self.infos[index].url + "/metrics") as response,
        ):
            return read_load(await response.text())

    async def complete(self) -> None:
        """Return when all engines run."""
        await self._complete.wait()

    async def kill(self, *indexes: int) -> float:
        """Kill engines at once with SIGKILL; return the tokens that they had made. Each is started again."""
        return await self._killed(indexes, lambda index: os.kill(self.infos[index].pid, signal.SIGKILL))

    async def kill_processes(self, *indexes: int) -> float:
        """The same with the processes that hold engines and read them: their engines end with them."""
        return await self._killed(indexes, lambda index: self._replicas[index].kill())

    async def _killed(self, indexes: Sequence[int], kill: Callable[[int], None]) -> float:
        counts = await asyncio.gather(*(self.made_by(index) for index in indexes))
        for index in indexes:
            kill(index)
        self._complete.clear()
        self._made_by_dead += sum(counts)
        return sum(counts)

    async def suspend(self, index: int) -> None:
        """Stop an engine with SIGSTOP. After a second its replica replaces it."""
        made, pid = await self.made_by(index), self.infos[index].pid
        self._suspended[pid] = made
        os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT to the engines that were suspended and still are."""
        for pid in self._suspended:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._suspended.clear()

    def restart_gateway(self, config: Config) -> None:
        """Kill the gateway; its successor has this configuration, for the same engines."""
        self._config = config
        self.kill_gateway()

    def kill_gateway(self) -> None:
        os.kill(self.gateway_pid, signal.SIGKILL)

    async def _start_engine(self, index: int) -> None:
        async with self._starting:
            self._joined(index, await self._replicas[index].start())

    def _joined(self, index: int, info: ReplicaInfo) -> None:
        self.infos[index] = info
        self._publish()
        if len(self.infos) == self.size:
            self._complete.set()

    async def _keep_engine(self, index: int) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            info = self.infos[index]
            if not psutil.pid_exists(info.pid):
                self.deaths += 1
                self._made_by_dead += self._suspended.pop(info.pid, 0.0)
                del self.infos[index]
                self._publish()
                if (successor := await self._replicas[index].successor()) is not None:
                    self._joined(index, successor)
                else:
                    await self._start_engine(index)

    async def _start_gateway(self) -> None:
        self._gateway = await asyncio.to_thread(serving, _serve_gateway, self._config, self._folder)

    async def _keep_gateway(self) -> None:
        while True:
            assert self._gateway is not None
            await self._gateway.ended()
            self.deaths += 1
            await self._start_gateway()

    def _publish(self) -> None:
        draft = self._folder / "replicas.new"
        draft.write_bytes(_REPLICAS.dump_json(list(self.infos.values())))
        draft.replace(self._folder / _PUBLISHED)


@asynccontextmanager
async def _serve_gateway(config: Config, folder: Path) -> AsyncIterator[str]:
    """Serve the replicas that are listed in the folder at each discovery, as Serve's list is; the log is beside it."""
    with (folder / "gateway.log").open("ab") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    write_log_lines(sys.stderr)

    async def discover() -> list[ReplicaInfo]:
        return _REPLICAS.validate_json(await asyncio.to_thread((folder / _PUBLISHED).read_bytes))

    listener = Listener(config, discover)
    yield await asyncio.to_thread(listener.start)
    await asyncio.to_thread(listener.stop)


@asynccontextmanager
async def running(*fleets: ProcessFleet) -> AsyncIterator[None]:
    """Start fleets one after the other; stop all at the end, and where one fails."""
    try:
        for fleet in fleets:
            await fleet.start()
        yield
    finally:
        await asyncio.gather(*(fleet.stop() for fleet in fleets))


async def healthy_within(url: str, seconds: float) -> None:
    """Return when a gateway that starts is healthy. Raise `TimeoutError`."""
    async with asyncio.timeout(seconds), aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(url + "/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_LOOK_S)
