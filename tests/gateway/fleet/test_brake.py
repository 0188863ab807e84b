"""The brake of an engine: its holders, and its end."""

import asyncio

import pytest

from engines.types import PauseMode
from gateway.fleet import brake
from gateway.fleet.brake import Holder
from tests.rigs.rig import Rig


async def test_an_error_of_any_kind_is_retried_until_the_engine_runs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(brake, "_RETRY_S", 0.05)
    replica = rig.fleet.replicas[0]
    await replica.brake.stop(Holder.UPDATE, PauseMode.KEEP, clear_cache=False, timeout_s=5.0)
    resume, calls = replica.engine.resume, 0

    async def broken(timeout_s: float) -> None:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise ZeroDivisionError("a fault that nobody foresaw")
        await resume(timeout_s)

    monkeypatch.setattr(replica.engine, "resume", broken)
    began = asyncio.get_running_loop().time()
    replica.brake.let_go(Holder.UPDATE)
    async with asyncio.timeout(20):
        while rig.replicas[0].is_paused:
            await asyncio.sleep(0.01)
    assert calls == 3
    assert asyncio.get_running_loop().time() - began >= 2 * 0.05
    assert "a fault that nobody foresaw" in capsys.readouterr().out
