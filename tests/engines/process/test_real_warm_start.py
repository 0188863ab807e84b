"""A real vLLM on CPU that is killed comes back as a fork of its warm process; the death of that costs one import."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from engines.errors import EngineError
from engines.process.engine_server import EngineServer
from engines.types import ReplicaInfo
from examples.tiny_model.task import COMMITTED
from tests.rigs.engines.real_vllm import engine_config, greedy_token_ids

pytestmark = pytest.mark.vllm

SOON_S = 60.0
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


def warm_process(info: ReplicaInfo) -> psutil.Process | None:
    """The process that the guard was forked from; None where that has ended."""
    parents = psutil.Process(info.pid).parents()
    return next((one for one in parents[1:] if "engines.process.warm_process" in one.cmdline()), None)


async def checked_until_it_fails(server: EngineServer) -> None:
    async with asyncio.timeout(SOON_S):
        while True:
            await server.check()


async def test_a_killed_vllm_comes_back_from_its_warm_process_and_without_one_too(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    server = EngineServer(engine_config(COMMITTED, tmp_path), replica_id="engine-0", group="engine", index=0)
    try:
        first = await server.start()
        warm = warm_process(first)
        assert warm is not None
        expected = greedy_token_ids(first.url, PROMPTS, 8)

        os.kill(first.pid, signal.SIGKILL)
        await server.ended()
        second = await server.start()
        assert warm_process(second) == warm
        assert greedy_token_ids(second.url, PROMPTS, 8) == expected

        warm.kill()
        (core,) = psutil.Process(second.pid).children()
        core.kill()  # the main process goes on for seconds
        with pytest.raises(EngineError):
            await checked_until_it_fails(server)
        await server.ended()
        third = await server.start()
        assert warm_process(third) not in (None, warm)
        assert greedy_token_ids(third.url, PROMPTS, 8) == expected
    finally:
        await server.stop()
