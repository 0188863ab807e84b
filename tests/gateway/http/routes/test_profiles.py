"""Profiles of simulated engines through the gateway, and the command that records them."""

import asyncio
import io
import marshal
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.config import EngineConfig, SimConfig
from engines.process.engine_server import EngineServer
from engines.types import EngineKind
from tests.rigs.rig import Rig, SimReplica, StartRig

FAST = SimConfig(decode_step_s=0.0, decode_step_per_seq_s=0.0)


async def start_profiled(start_rig: StartRig, folder: Path, **sections: Any) -> Rig:
    """Two replicas. The first can be profiled; a second profiler in this process would end it."""
    replicas = [await SimReplica(f"engine-{index}", index, FAST).start() for index in range(2)]
    replicas[0].info = replace(replicas[0].info, profiles=str(folder))
    return await start_rig(replicas=replicas, **sections)


async def profiled(rig: Rig, **body: Any) -> tuple[int, bytes]:
    async with rig.client.post(rig.url + "/profile", json={"replicas": ["engine-0"]} | body) as reply:
        return reply.status, await reply.read()


async def test_a_record_shows_the_engine_at_work_and_leaves_no_file(start_rig: StartRig, tmp_path: Path) -> None:
    rig = await start_profiled(start_rig, tmp_path)
    (tmp_path / "older.pstats").write_text("of another record")
    recording = asyncio.create_task(profiled(rig, seconds=0.3))
    while not recording.done():
        await rig.post("/v1/completions", {"prompt": [[3], [4]], "max_tokens": 8})
    status, archive = await recording
    assert status == 200, archive
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        (member,) = tar.getmembers()
        file = tar.extractfile(member)
        assert file is not None
        functions = marshal.load(file)
    assert member.name.startswith("engine-0/sim-")
    assert "scheduler.py" in {Path(source).name for source, _, _ in functions}
    assert os.listdir(tmp_path) == ["older.pstats"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"seconds": 0}, "seconds: Expected `float` > 0.0, it is 0"),
        ({"seconds": "5"}, "seconds: Expected `float`, got `str`"),
        ({"replicas": "engine-0"}, "replicas: Expected `array | null`, got `str`"),
        ({"replicas": ["engine-9"]}, "there is no replica engine-9"),
        ({"replicas": ["engine-1"]}, "engine-1 has no profiler: set engine.profiling: true"),
        ({"replicas": None}, "engine-1 has no profiler"),
    ],
)
async def test_a_record_that_cannot_be_is_refused(
    start_rig: StartRig, tmp_path: Path, body: dict[str, Any], words: str
) -> None:
    status, answer = await profiled(await start_profiled(start_rig, tmp_path), **body)
    assert status == 400
    assert words in answer.decode()


async def test_a_client_that_leaves_ends_the_record(start_rig: StartRig, tmp_path: Path) -> None:
    rig = await start_profiled(start_rig, tmp_path)
    recording = asyncio.create_task(profiled(rig, seconds=600))
    async with asyncio.timeout(20):
        while not rig.replicas[0].is_profiled:
            await asyncio.sleep(0.01)
        status, answer = await profiled(rig)
        assert (status, b"engines are being profiled" in answer) == (400, True)
        recording.cancel()
        while rig.replicas[0].is_profiled:
            await asyncio.sleep(0.01)


async def test_an_engine_process_with_profiling_has_a_folder_and_records_into_it(tmp_path: Path) -> None:
    config = EngineConfig(kind=EngineKind.SIM, model="sim", sim=FAST, profiling=True, log_dir=str(tmp_path))
    server = EngineServer(config, replica_id="engine-0", group="engine", index=0)
    try:
        info = await server.start()
        engine = server._engine
        assert engine is not None
        await engine.start_profile(info.profiles, 20.0)
        await engine.stop_profile(20.0)
    finally:
        await server.stop()
    (name,) = os.listdir(info.profiles)
    assert name.endswith(".pstats")
