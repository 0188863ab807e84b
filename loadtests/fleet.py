"""Engines, each with its reader, and a gateway on this host without Ray, to measure the data path alone.

    python -m loadtests.fleet -c examples/sim.yaml [KEY=VALUE ...] [-- COMMAND ...]

Prints one line of JSON with URLs and process ids and runs until standard input closes; or runs COMMAND and ends with
it. In COMMAND, {url} and {pid} are replaced by the gateway's, and the word {engines} by the URLs of all engines.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from engines.config import EngineConfig
from engines.errors import ConfigError, EngineStartFailed
from engines.process.launch import gpus_per_replica, gpus_to_reserve
from engines.process.log_lines import write_log_lines
from engines.store.weight_store import remove_store
from engines.types import ReplicaInfo
from gateway.config.load import load, with_secrets
from gateway.config.machine import visible_gpus
from gateway.config.schema import Config
from gateway.http.listener import Listener
from gateway.ledger.ledger import default_folder
from gateway.weights.snapshots import in_memory
from loadtests.own_process import Served, own_process
from loadtests.replica_process import ReplicaProcess

_COMMAND_STOP_S = 10.0


class LocalFleet:
    """Starts the engines of a configuration and a gateway; ends them all with `stop`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._replicas = replica_processes(config, visible_gpus())
        self._gateways = AsyncExitStack()

    async def start(self) -> tuple[list[ReplicaInfo], Served]:
        """Start engines and gateway. Raise `EngineStartFailed` for the first engine that fails, and stop the others."""
        infos = await self.start_engines()
        return infos, await self._gateways.enter_async_context(self.gateway(self._config, infos))

    async def start_engines(self) -> list[ReplicaInfo]:
        """Start only the engines; see `gateway`."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(replica.start()) for replica in self._replicas]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def gateway(self, config: Config, infos: list[ReplicaInfo]) -> AbstractAsyncContextManager[Served]:
        """Run a gateway with other settings over started engines, until the end of the block."""
        return own_process(_serve_gateway, gateway_config(config, len(infos)), infos)

    async def stop(self) -> None:
        await asyncio.gather(self._gateways.aclose(), *(replica.stop() for replica in self._replicas))


def replica_processes(config: Config, gpus: Sequence[str]) -> list[ReplicaProcess]:
    """Return the replicas of each group, with the next free GPUs of `gpus`."""
    free, replicas = list(gpus), []
    for name, group in config.groups.items():
        for index in range(group.num_replicas):
            share = gpus_to_reserve(group)
            if 0 < share < 1:  # replicas share a GPU
                own = [gpus[int(index * share)]] if index * share < len(gpus) else [""]
            else:
                own = [free.pop(0) if free else "" for _ in range(gpus_per_replica(group))]
            if "" in own:
                raise ConfigError(f"engine group {name!r}: {len(gpus)} GPUs are too few for its replica {index}")
            engine = _on_gpus(group, own)
            replicas.append(ReplicaProcess(engine, replica_id=f"{name}-{index}", group=name, index=index))
    return replicas


def gateway_config(config: Config, num_replicas: int) -> Config:
    """Return the configuration of a gateway for `num_replicas`."""
    engine = config.engine.model_copy(update={"num_replicas": num_replicas})
    return config.model_copy(update={"engine": engine, "engines": {}})


def _on_gpus(engine: EngineConfig, gpus: Sequence[str]) -> EngineConfig:
    if not gpus:
        return engine
    return engine.model_copy(update={"env": {**engine.env, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}})


@asynccontextmanager
async def _serve_gateway(config: Config, infos: list[ReplicaInfo]) -> AsyncIterator[str]:
    # Standard output has only the line of URLs.
    write_log_lines(sys.stderr)

    async def discover() -> list[ReplicaInfo]:
        return infos

    with named_apart(config) as own:
        listener = Listener(own, discover)
        yield await asyncio.to_thread(listener.start)
        await asyncio.to_thread(listener.stop)


@contextmanager
def named_apart(config: Config) -> Iterator[Config]:
    """Yield a configuration for this process alone, as several gateways run side by side: with a weight store and a
    ledger of its own, which are removed."""
    own = config.model_copy(update={"name": f"{config.name}-{os.getpid()}"})
    try:
        yield own
    finally:
        remove_store(in_memory(own.name))
        shutil.rmtree(default_folder(own.name).parent, ignore_errors=True)


async def _run(config: Config, command: Sequence[str]) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    fleet = LocalFleet(config)
    starting = asyncio.create_task(fleet.start())
    try:
        await _first(starting, stopping)
        if not starting.done():
            return 130
        infos, gateway = starting.result()
        if command:
            return await _run_command(filled(command, infos, gateway), stopping)
        engines = [{"url": info.url, "pid": info.pid, "log": info.log_path} for info in infos]
        print(json.dumps({"engines": engines, "gateway": {"url": gateway.url, "pid": gateway.pid}}), flush=True)
        threading.Thread(target=_wait_for_end_of_input, args=(loop, stopping), daemon=True).start()
        await stopping.wait()
        return 0
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await fleet.stop()


def filled(command: Sequence[str], infos: Sequence[ReplicaInfo], gateway: Served) -> list[str]:
    """Return the command with URLs and process id filled in."""
    words: list[str] = []
    for word in command:
        given = word.replace("{url}", gateway.url).replace("{pid}", str(gateway.pid))
        words += [info.url for info in infos] if word == "{engines}" else [given]
    return words


async def _run_command(command: Sequence[str], stopping: asyncio.Event) -> int:
    process = await asyncio.create_subprocess_exec(*command)
    ended = asyncio.create_task(process.wait())
    await _first(ended, stopping)
    if not ended.done():
        process.terminate()
        try:
            async with asyncio.timeout(_COMMAND_STOP_S):
                await ended
        except TimeoutError:
            process.kill()
    return await process.wait()


async def _first(task: "asyncio.Task[object]", stopping: asyncio.Event) -> None:
    """Return when the task has ended or a stop is requested."""
    asked = asyncio.create_task(stopping.wait())
    await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()


def _wait_for_end_of_input(loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> None:
    while os.read(0, 4096):  # a read of sys.stdin would hold its lock, at which the interpreter ends in an abort
        pass
    loop.call_soon_threadsafe(stopping.set)


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.fleet", description=__doc__.splitlines()[0])
    parser.add_argument("-c", "--config", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the file's")
    return parser.parse_args(argv)


def main() -> int:
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    args = _parse_arguments(argv[:cut])
    command = argv[cut + 1 :]
    try:
        if command and not shutil.which(command[0]):
            raise ConfigError(f"{command[0]}: no such command; put .venv/bin on PATH, or give its path")
        return asyncio.run(_run(with_secrets(load(args.config, args.overrides)), command))
    except (ConfigError, EngineStartFailed) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
