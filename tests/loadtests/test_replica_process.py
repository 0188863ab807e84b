"""A replica in a process of its own, as Ray Serve has it."""

import psutil
import pytest

from engines.chunks import Chunk
from engines.config import EngineConfig
from engines.errors import EngineStartFailed
from engines.types import ReplicaInfo
from gateway.config.schema import Config
from gateway.http.engine_client import engine_client
from loadtests.replica_process import ReplicaProcess
from tests.rigs.calls import until


def replica(**engine: object) -> ReplicaProcess:
    config = EngineConfig.model_validate({"kind": "sim", "model": "sim", "stop_timeout_s": 1, **engine})
    return ReplicaProcess(config, replica_id="engine-0", group="engine", index=0)


async def read(info: ReplicaInfo, tokens: int) -> list[Chunk]:
    """The chunks of a reply that a gateway gets from the reader beside the engine."""
    engine = engine_client(Config(), info)
    assert engine.beside is not None
    body = {"model": "sim", "prompt": [5, 6], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    chunks: list[Chunk] = []
    try:
        await engine.beside.read("/v1/completions", body, 30, chunks.extend, is_whole=False, streams=False)
        return chunks
    finally:
        await engine.beside.close()
        await engine.close()


async def until_gone(pid: int) -> None:
    await until(lambda: not psutil.pid_exists(pid))


async def test_it_reads_beside_its_engine_which_ends_with_it_also_when_it_is_killed() -> None:
    process = replica()
    try:
        first = await process.start()
        assert "".join(choice.text or "" for chunk in await read(first, 8) for choice in chunk.choices)
        process.kill()
        await until_gone(first.pid)
        second = await process.start()
        assert second.incarnation != first.incarnation
        assert await read(second, 8)
    finally:
        await process.stop()
    await until_gone(second.pid)


async def test_the_reason_of_a_start_that_fails_is_told() -> None:
    process = replica(extra={"no-such-option": True})
    with pytest.raises(EngineStartFailed, match="no-such-option"):
        await process.start()
