"""What a real engine on CPU leaves in the folder of temporary files when it is killed: nothing."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engines.config import EngineConfig
from engines.errors import EngineError
from engines.inside_vllm.plugin import METHOD
from engines.process.engine_server import EngineServer
from examples.tiny_model.task import COMMITTED
from tests.rigs.engines import real_sglang, real_vllm

_ENDS_WITHIN_S = 60.0


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files of the machine."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if not path.is_dir()]


def kinds(place: Path) -> set[str]:
    return {"socket" if path.is_socket() else "file" for path in files(place)}


async def checked_until_it_fails(server: EngineServer) -> None:
    while True:
        await server.check()


async def killed(config: EngineConfig, place: Path) -> set[str]:
    """Start an engine and kill it; return the kinds of temporary files that it had."""
    server = EngineServer(config, replica_id="engine-0", group="engine", index=0)
    try:
        info = await server.start()
        had = kinds(place)
        assert info.pid
        os.kill(info.pid, signal.SIGKILL)
        with pytest.raises(EngineError):
            await asyncio.wait_for(checked_until_it_fails(server), _ENDS_WITHIN_S)
    finally:
        await server.stop()
    return had


@pytest.mark.vllm
async def test_sockets_of_a_killed_vllm_are_gone(place: Path, tmp_path: Path) -> None:
    """An EngineCore in a process of its own, as on GPUs, is reached by sockets."""
    pytest.importorskip("vllm")
    levers = {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}}
    config = real_vllm.engine_config(COMMITTED, tmp_path).model_copy(update=levers)
    assert "socket" in await killed(config, place)
    assert files(place) == []


@pytest.mark.sglang
async def test_files_of_a_killed_sglang_are_gone(place: Path, tmp_path: Path) -> None:
    assert await killed(real_sglang.engine_config(COMMITTED, tmp_path), place)
    assert files(place) == []


@pytest.mark.vllm
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
async def test_no_process_of_a_vllm_outlives_its_guard(method: str, tmp_path: Path) -> None:
    """`pkill -9 -f vllm` and the kernel's want of memory kill guards too."""
    pytest.importorskip("vllm")
    levers = {"env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", METHOD: method}}
    server = EngineServer(
        real_vllm.engine_config(COMMITTED, tmp_path).model_copy(update=levers),
        replica_id="engine-0",
        group="engine",
        index=0,
    )
    try:
        info = await server.start()
        guard = psutil.Process(info.pid).parent()
        assert guard is not None
        own = guard.children(recursive=True)
        guard.kill()
        assert len(own) > 1
        assert psutil.wait_procs(own, _ENDS_WITHIN_S)[1] == []
    finally:
        await server.stop()
