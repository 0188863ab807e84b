"""Real vLLM servers on CPU for tests marked `vllm`, alone or as a fleet behind a gateway, started by the product."""

import asyncio
import json
import os
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.clients.external import ExternalServer
from engines.clients.vllm_engine import VllmEngine
from engines.config import EngineConfig
from engines.errors import RolloutGatewayError
from engines.process.engine_server import EngineServer
from engines.process.process import Command, EngineProcess
from engines.types import EngineKind, PauseMode, ReplicaInfo
from gateway.config.schema import Config
from gateway.http.listener import Listener
from sim.model import CHECKPOINT_VERSION
from tests.rigs.engines.engine_brake import BRAKES, VllmBrake
from tests.rigs.readers import Readers
from tests.rigs.waiting import wait_until

START_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 600.0
# A dead engine's port is closed, which is seen at once. One that is held still, or slow on a busy machine, is alive.
_WATCH = {"probe_interval_s": 0.2, "probe_timeout_s": 60.0, "stalled_after_s": REQUEST_TIMEOUT_S, "lost_after_s": 2.0}


@dataclass(frozen=True)
class RealFleet:
    """A gateway's URL and the replicas behind it. `restart` starts the engine of one anew, as Serve would."""

    url: str
    replicas: list[ReplicaInfo]
    restart: Callable[[int], None]

    def call(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
        """Status and decoded reply, whatever the status. A `bytes` body is sent as it is."""
        status, text = self.text(path, body, method)
        return status, json.loads(text)

    def text(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, str]:
        """Status and reply, whatever the status."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The decoded chunks of a streamed reply, which has to end as one should."""
        data = json.dumps(body | {"stream": True}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            events = [event.removeprefix(b"data: ") for event in response.read().split(b"\n\n") if event]
        assert events[-1] == b"[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def kill(self, index: int) -> None:
        """kill -9 of the engine itself; its guard ends with it."""
        os.kill(self.replicas[index].pid, signal.SIGKILL)

    def until_serving(self, version: int | None = None) -> dict[str, Any]:
        """The status, once every replica that was started serves, and serves `version` where that is given."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            status: dict[str, Any] = self.call("/status")[1]
            found = [(one["state"], one["weight_version"]) for one in status["replicas"]]
            wanted = [("SERVING", seen if version is None else version) for _, seen in found]
            if found == wanted and len(found) == len(self.replicas):
                return status
            assert time.monotonic() < deadline, status
            time.sleep(0.05)


@contextmanager
def gathered(real: RealFleet, samples: int, tokens: int = 20) -> Iterator[None]:
    """Hold the engines still while requests of so many samples come in, which so begin together.

    The engines stand still again, by themselves, where the samples that have not ended have so many tokens:
    `standing_amid` has to follow.
    """
    with standing(real):
        yield
        wait_until(lambda: sum(_samples_in_flight(real)) >= samples, REQUEST_TIMEOUT_S)
        for replica, count in zip(real.replicas, _samples_in_flight(real), strict=True):
            if count:
                _brake(real, replica).halt_at(count, tokens)


@contextmanager
def standing_amid(real: RealFleet) -> Iterator[None]:
    """The engines stand still amid the samples that were `gathered`. An update sets them going again."""
    counts = _samples_in_flight(real)
    busy = [_brake(real, replica) for replica, count in zip(real.replicas, counts, strict=True) if count]
    wait_until(lambda: all(brake.is_paused() for brake in busy), REQUEST_TIMEOUT_S)
    with standing(real):
        yield


@contextmanager
def standing(real: RealFleet) -> Iterator[None]:
    """Hold the engines still behind the gateway's back. An update sets them going again."""
    brakes = [_brake(real, replica) for replica in real.replicas]
    for brake in brakes:
        brake.pause()
    try:
        yield
    finally:
        for brake in brakes:
            with suppress(OSError):  # it was killed
                brake.resume()


def _brake(real: RealFleet, replica: ReplicaInfo) -> VllmBrake:
    return BRAKES[replica.dialect](replace(real, url=replica.url).call)


def _samples_in_flight(real: RealFleet) -> list[int]:
    """Of each replica, by the gateway's count."""
    counts = {one["replica_id"]: one["samples_in_flight"] for one in real.call("/status")[1]["replicas"]}
    return [counts[replica.replica_id] for replica in real.replicas]


def until_receiving(real: RealFleet) -> None:
    """Returns when a weight update waits for its tensors."""
    wait_until(lambda: (real.call("/status")[1]["weight_update"] or {}).get("phase") == "RECEIVING", REQUEST_TIMEOUT_S)


@contextmanager
def fleet(
    model: Path, log_dir: Path, num_replicas: int = 2, levers: Mapping[str, Any] | None = None, **sections: Any
) -> Iterator[RealFleet]:
    """Replicas of one model behind a gateway. `levers` are fields of their configuration."""
    engine = engine_config(model, log_dir).model_copy(update={"num_replicas": num_replicas, **(levers or {})})
    with app({"engine": engine}, _kept.lent(engine), **sections) as running:
        yield running


@contextmanager
def app(
    groups: Mapping[str, EngineConfig], engines: "AbstractContextManager[Engines] | None" = None, **sections: Any
) -> Iterator[RealFleet]:
    """Engine groups behind a gateway, without Ray: nobody starts a replica anew. `sections` go into the config.

    `engines` are those of the groups; without them they are started here, and ended.
    """
    tree = {name: group.model_dump() for name, group in groups.items()}
    # Beside others that serve the same app name on this machine.
    store = tempfile.TemporaryDirectory(prefix="store-")
    weights = {"store": store.name} | sections.pop("weights", {})
    gateway = {"port": 0, "ledger": None} | sections.pop("gateway", {})
    config = Config.model_validate(
        {"engines": tree, "fleet": _WATCH, "gateway": gateway, "weights": weights, **sections}
    )
    with store, engines or started(groups) as (runner, servers, replicas):
        readers = Readers()

        async def discover() -> list[ReplicaInfo]:
            return await readers.beside(replicas)

        def restart(index: int) -> None:
            runner.run(servers[index].stop())
            replicas[index] = runner.run(servers[index].start())

        listener = Listener(config, discover)
        url = listener.start()
        try:
            yield RealFleet(url, replicas, restart)
        finally:
            listener.stop()
            readers.stop()


Server = EngineServer | ExternalServer
Engines = tuple[asyncio.Runner, Sequence[Server], list[ReplicaInfo]]
"""Who runs their coroutines, the engines, and what each says of itself."""


@contextmanager
def started(groups: Mapping[str, EngineConfig]) -> Iterator[Engines]:
    """The replicas of engine groups, for more than one gateway."""
    servers = [_server(name, group, index) for name, group in groups.items() for index in range(group.num_replicas)]
    with asyncio.Runner() as runner:
        try:
            yield runner, servers, runner.run(_start_all(servers))
        finally:
            runner.run(_stop_all(servers))


class KeptEngines:
    """Engines that go from one fleet to the next, with the weights of their checkpoint again, as a start of vLLM takes
    most of a test's time. One that does not come back as it was is ended; the others end with the run of the tests."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._idle: dict[str, tuple[EngineServer, ReplicaInfo]] = {}

    @contextmanager
    def lent(self, group: EngineConfig) -> Iterator[Engines]:
        self._runner = runner = self._runner or asyncio.Runner()
        names = [_likeness(group, index) for index in range(group.num_replicas)]
        found = [self._idle.pop(name, None) for name in names]
        servers = [one[0] if one else _engine_server("engine", group, index) for index, one in enumerate(found)]
        try:
            replicas = runner.run(_told(servers, found))
        except BaseException:
            runner.run(_stop_all(servers))
            raise
        try:
            yield runner, servers, replicas
        finally:
            for name, server, info in zip(names, servers, replicas, strict=True):
                if runner.run(_is_as_new(server, info)):
                    self._idle[name] = server, info

    def end(self) -> None:
        if self._runner is not None:
            self._runner.run(_stop_all([server for server, _ in self._idle.values()]))
            self._runner.close()
        self._idle, self._runner = {}, None


_kept = KeptEngines()


def pytest_sessionfinish() -> None:
    """For conftest.py."""
    _kept.end()


def _likeness(group: EngineConfig, index: int) -> str:
    """The same of engines that only differ in what they do not know of."""
    return f"{index} {group.model_copy(update={'log_dir': '', 'num_replicas': 1}).model_dump_json()}"


async def _told(
    servers: Sequence[EngineServer], kept: Sequence[tuple[EngineServer, ReplicaInfo] | None]
) -> list[ReplicaInfo]:
    """The descriptions of servers that are not kept, once they have started."""

    async def told(index: int) -> ReplicaInfo:
        return one[1] if (one := kept[index]) else await servers[index].start()

    return list(await asyncio.gather(*map(told, range(len(servers)))))


async def _is_as_new(server: EngineServer, info: ReplicaInfo) -> bool:
    """Return True if the engine serves its checkpoint again, and nothing of earlier tests. Otherwise it is ended."""
    engine = VllmEngine(info.replica_id, info.url, has_tee=True)
    try:
        await server.check()
        await engine.pause(PauseMode.ABORT, clear_cache=True, timeout_s=REQUEST_TIMEOUT_S)
        await engine.load_snapshot(info.model, 0, REQUEST_TIMEOUT_S)
        await engine.ask("POST", "/update_weight_version", {"new_version": CHECKPOINT_VERSION}, REQUEST_TIMEOUT_S)
        await engine.resume(REQUEST_TIMEOUT_S)
        return True
    except RolloutGatewayError as error:
        print(f"{info.replica_id} is not kept: {error}")
        await server.stop()
        return False
    finally:
        await engine.close()


def _server(name: str, group: EngineConfig, index: int) -> Server:
    if group.kind is EngineKind.EXTERNAL:
        return ExternalServer(group, replica_id=f"{name}-{index}", group=name)
    return _engine_server(name, group, index)


def _engine_server(name: str, group: EngineConfig, index: int) -> EngineServer:
    return EngineServer(group, replica_id=f"{name}-{index}", group=name, index=index, process=engine_process)


def engine_process(command: Command, log_path: Path, stop_timeout_s: float) -> EngineProcess:
    """As in production, with a `Halt` in a vLLM."""
    preload = command.preload
    if preload is not None:
        preload = replace(preload, modules=[*preload.modules, "tests.rigs.engines.halting"])
    return EngineProcess(replace(command, preload=preload), log_path, stop_timeout_s)


async def _start_all(servers: Sequence[Server]) -> list[ReplicaInfo]:
    return list(await asyncio.gather(*(server.start() for server in servers)))


async def _stop_all(servers: Sequence[Server]) -> None:
    await asyncio.gather(*(server.stop() for server in servers))


def engine_config(model: Path, log_dir: Path) -> EngineConfig:
    """As examples/tiny-cpu.yaml has it."""
    return EngineConfig(
        model=str(model),
        device="cpu",
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=512,
        max_num_seqs=64,
        log_dir=str(log_dir),
        stop_timeout_s=5.0,
    )


@contextmanager
def served(model: Path, log_dir: Path, **levers: Any) -> Iterator[str]:
    """Serve `model` in float32 on one replica, without a gateway; gives its URL."""
    with started({"engine": engine_config(model, log_dir).model_copy(update=levers)}) as (_, _, (info,)):
        yield info.url


def on_engine(url: str, call: Callable[[VllmEngine], Awaitable[Any]]) -> Any:
    """Return the result of a call on a client of the server at this URL."""

    async def run() -> Any:
        engine = VllmEngine("r1", url, has_tee=True)
        try:
            return await call(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def greedy_token_ids(url: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    model = _ask(f"{url}/v1/models")["data"][0]["id"]
    body = {"model": model, "prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    return [choice["token_ids"] for choice in _ask(f"{url}/v1/completions", body)["choices"]]


def _ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        reply: dict[str, Any] = json.load(response)
        return reply
