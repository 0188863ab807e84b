"""Real vLLM servers on CPU for tests marked `vllm`, alone or as a fleet behind a gateway, started by the product."""

import asyncio
import json
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.config import EngineConfig
from engines.external import ExternalServer
from engines.launch import engine_command
from engines.process import EngineProcess
from engines.server import EngineServer, free_port
from engines.types import EngineKind, ReplicaInfo
from gateway.config import Config
from gateway.listener import Listener

START_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 60.0
FAST = {"gateway": {"port": 0}, "fleet": {"probe_interval_s": 0.2, "lost_after_s": 2.0}}


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


@contextmanager
def fleet(model: Path, log_dir: Path, num_replicas: int = 2, **sections: Any) -> Iterator[RealFleet]:
    """Replicas of one model behind a gateway."""
    engine = engine_config(model, log_dir).model_copy(update={"num_replicas": num_replicas})
    with app({"engine": engine}, **sections) as running:
        yield running


@contextmanager
def app(groups: Mapping[str, EngineConfig], **sections: Any) -> Iterator[RealFleet]:
    """Engine groups behind a gateway, without Ray: nobody starts a replica anew. `sections` go into the config."""
    engines = {name: group.model_dump() for name, group in groups.items()}
    # Beside others that serve the same app name on this machine.
    store = tempfile.TemporaryDirectory(prefix="store-")
    weights = {"store": store.name} | sections.pop("weights", {})
    config = Config.model_validate({"engines": engines, **FAST, "weights": weights, **sections})
    servers = [_server(name, group, index) for name, group in groups.items() for index in range(group.num_replicas)]
    with store, asyncio.Runner() as runner:
        try:
            replicas = runner.run(_start_all(servers))

            async def discover() -> list[ReplicaInfo]:
                return replicas

            def restart(index: int) -> None:
                runner.run(servers[index].stop())
                replicas[index] = runner.run(servers[index].start())

            listener = Listener(config, discover)
            url = listener.start()
            try:
                yield RealFleet(url, replicas, restart)
            finally:
                listener.stop()
        finally:
            runner.run(_stop_all(servers))


def _server(name: str, group: EngineConfig, index: int) -> EngineServer | ExternalServer:
    if group.kind is EngineKind.EXTERNAL:
        return ExternalServer(group, replica_id=f"{name}-{index}", group=name)
    return EngineServer(group, replica_id=f"{name}-{index}", group=name, index=index)


async def _start_all(servers: Sequence[EngineServer | ExternalServer]) -> list[ReplicaInfo]:
    return list(await asyncio.gather(*(server.start() for server in servers)))


async def _stop_all(servers: Sequence[EngineServer | ExternalServer]) -> None:
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
def served(model: Path, log_dir: Path) -> Iterator[str]:
    """Serve `model` in float32 on one replica; gives its URL."""
    config = engine_config(model, log_dir)
    port = free_port()
    process = EngineProcess(
        engine_command(config, port=port, index=0), log_dir / f"vllm-{port}.log", stop_timeout_s=5.0
    )
    process.start()
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_health(url, process)
        yield url
    finally:
        asyncio.run(process.stop())


def greedy_token_ids(url: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    model = _ask(f"{url}/v1/models")["data"][0]["id"]
    body = {"model": model, "prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    return [choice["token_ids"] for choice in _ask(f"{url}/v1/completions", body)["choices"]]


def wait_for_health(url: str, process: EngineProcess) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2.0):
                return
        except OSError as error:
            if process.exit_code is not None or time.monotonic() > deadline:
                raise AssertionError(f"vLLM did not start:\n{process.last_words()}") from error
        time.sleep(0.2)


def _ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        reply: dict[str, Any] = json.load(response)
        return reply
