"""The life of one engine server: start, check, stop, with real processes of the simulated engine."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engines.config import EngineConfig
from engines.errors import ConfigError, EngineStartFailed
from engines.process import engine_server as server
from engines.process.engine_server import EngineServer, expected_tensors, streams_coarsely
from engines.process.launch import engine_command
from engines.process.port import free_port
from engines.process.process import Command, EngineProcess
from engines.types import EngineKind, ReplicaInfo, TensorMeta
from tests.rigs.calls import until

SOON_S = 30.0
NewServer = Callable[..., EngineServer]


@pytest.fixture
def processes() -> list[EngineProcess]:
    """Those that `new_server` has made."""
    return []


@pytest.fixture
async def new_server(tmp_path: Path, processes: list[EngineProcess]) -> AsyncIterator[NewServer]:
    """Makes servers of a simulated engine: `new_server(max_num_seqs=7)`."""
    servers: list[EngineServer] = []

    def process(*arguments: Any) -> EngineProcess:
        processes.append(EngineProcess(*arguments))
        return processes[-1]

    def new(**levers: Any) -> EngineServer:
        config = EngineConfig.model_validate(
            {"kind": "sim", "model": "tiny", "log_dir": str(tmp_path), "stop_timeout_s": 5, **levers}
        )
        servers.append(EngineServer(config, replica_id="engine-0", group="engine", index=3, process=process))
        return servers[-1]

    yield new
    for one in servers:
        await one.stop()


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def logs(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def draw(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """Have the next starts draw these ports, free or not."""
    drawn = iter(ports)
    monkeypatch.setattr(server, "HeldPort", lambda: SimpleNamespace(number=next(drawn), release=lambda: None))


async def test_a_started_engine_says_what_it_is(
    new_server: NewServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    info = await new_server(
        max_model_len=64, max_num_seqs=7, tensor_parallel_size=2, sim={"tensors": {"head": [3, 5]}}
    ).start()
    (log,) = logs(tmp_path)
    assert info.url.rpartition(":")[2] in command_of(info.pid)
    assert info == ReplicaInfo(
        replica_id="engine-0",
        incarnation=info.incarnation,
        group="engine",
        has_tee=True,
        fetches=True,
        kind=EngineKind.SIM,
        url=info.url,
        model="tiny",
        world_size=2,
        max_model_len=64,
        max_num_seqs=7,
        engine_version="0.32.0+sim",
        streams=True,
        gpu_ids=(2, 3),
        pid=info.pid,
        started=info.started,
        phases=info.phases,
        log_path=str(log),
        tensors=(TensorMeta(name="head", dtype="float32", shape=(3, 5)),),
        capabilities=info.capabilities,
    )
    assert "/v1/completions" in info.capabilities


async def test_a_start_tells_its_phases_while_it_goes_on_and_afterwards(new_server: NewServer) -> None:
    server = new_server(sim={"start_s": 0.6})
    starting = asyncio.create_task(server.start())
    await until(lambda: [phase for phase, _ in server.phases.told()] == ["importing", "starting"])
    info = await starting
    times = [since for _, since in info.phases]
    assert [phase for phase, _ in info.phases] == ["importing", "starting", "warming up", "preparing updates"]
    assert sorted(times) == times
    assert times[2] - times[1] > 0.5, "of the sleep"
    assert times[-1] <= info.started
    await server.start()
    assert server.phases.told()[0][1] > info.started, "those of a later start are its own"


@pytest.mark.parametrize("lever", [{"stream_interval": 1}, {"extra": {"enable_return_routed_experts": True}}])
def test_an_engine_with_short_chunks_or_routed_experts_is_read_whole(lever: dict[str, Any]) -> None:
    assert streams_coarsely(EngineConfig())
    assert not streams_coarsely(EngineConfig(**lever))


@pytest.mark.parametrize(
    ("stored", "asked", "are_known"),
    [(None, None, True), (None, "fp8", True), ("fp8", "fp8", False), ("fp8", None, False)],
)
def test_updates_of_a_plain_checkpoint_are_checked_also_where_the_engine_quantises_it(
    tmp_path: Path, stored: str | None, asked: str | None, are_known: bool
) -> None:
    model = {"quantization_config": {"quant_method": stored}} if stored else {}
    (tmp_path / "config.json").write_text(json.dumps(model))
    save_file({"head": torch.zeros(3, 5)}, tmp_path / "model.safetensors")
    tensors = expected_tensors(EngineConfig(model=str(tmp_path), quantization=asked))
    assert tensors == ((TensorMeta(name="head", dtype="float32", shape=(3, 5)),) if are_known else None)


async def test_a_cancelled_start_ends_its_engine(
    new_server: NewServer, processes: list[EngineProcess], tmp_path: Path
) -> None:
    start = asyncio.create_task(new_server().start())
    async with asyncio.timeout(SOON_S):
        while not logs(tmp_path):
            await asyncio.sleep(0.01)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert [process.exit_code is None for process in processes] == [False]


async def test_an_engine_that_does_not_come_up_in_time_is_ended(
    new_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "engine_command", lambda *_, **__: Command(["sleep", "300"]))
    began = time.monotonic()
    with pytest.raises(
        EngineStartFailed, match=r"was not ready within 0\.5 s; last stage: .*; raise engine\.start_timeout_s"
    ):
        await new_server(start_timeout_s=0.5).start()
    assert time.monotonic() - began < SOON_S


async def test_a_port_that_somebody_took_meanwhile_is_left_for_another(
    new_server: NewServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", 0))
        taken, free = somebody.getsockname()[1], free_port()
        draw(monkeypatch, taken, free)
        info = await new_server().start()
    assert info.url == f"http://127.0.0.1:{free}"
    assert len(logs(tmp_path)) == 2, "each start has a log of its own"


async def test_a_failure_that_nobody_knows_is_tried_once_more_and_told_with_the_last_error(
    new_server: NewServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "echo 'ValueError: the moon is full'; echo bye; exit 3"
    monkeypatch.setattr(server, "engine_command", lambda *_, **__: Command(["sh", "-c", script]))
    with pytest.raises(EngineStartFailed) as failed:
        await new_server().start()
    assert str(failed.value).splitlines()[0] == (
        "replica engine-0: the engine ended with 3 before it was ready for an unknown reason; "
        'its last error: "ValueError: the moon is full"'
    )
    assert len(logs(tmp_path)) == 2


MEASURED = (
    "Replace gpu_memory_utilization config with `--kv-cache-memory=123456789` (0.11 GiB) to fit into requested memory"
)


@pytest.mark.parametrize("fits", [True, False])
async def test_a_restart_takes_the_kv_cache_that_was_measured_unless_a_start_with_it_fails(
    fits: bool, new_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(config: EngineConfig, *, port: int, index: int) -> Command:
        asked.append(config.kv_cache_memory_bytes)
        measures = config.kv_cache_memory_bytes is None
        if not (measures or fits):
            return Command(["sh", "-c", "echo torch.OutOfMemoryError: CUDA out of memory; exit 1"])
        script = f"echo '{MEASURED if measures else ''}'; exec \"$@\""
        return Command(["sh", "-c", script, "sh", *engine_command(config, port=port, index=index).argv])

    asked: list[int | None] = []
    monkeypatch.setattr(server, "engine_command", command)
    one = new_server()
    for _ in range(3):
        await one.start()
    known = 123456789
    assert asked == ([None, known, known] if fits else [None, known, None, known, None])


async def test_a_folder_where_no_log_can_be_written_is_named_by_its_key(new_server: NewServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = f"{tmp_path}/file/logs"
    with pytest.raises(ConfigError, match=re.escape(f"engine.log_dir = {folder!r}: no log can be written there")):
        await new_server(log_dir=folder).start()
