"""The study of a recovery, of two simulated engines behind a gateway on this machine."""

import asyncio
from pathlib import Path

import pytest

from engines.config import SimConfig
from loadtests.chaos.process_fleet import ProcessFleet, fleet_config, healthy_within, running
from loadtests.studies import recovery

pytestmark = pytest.mark.load


async def test_a_recovery_ends_with_tokens_and_one_without_time_for_it_fails_the_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = ProcessFleet(fleet_config("recovery", 2, SimConfig(), tmp_path), tmp_path)
    async with running(fleet):
        await healthy_within(fleet.url, 60)
        asked = ["--url", fleet.url, "--times", "1", "--apart-s", "0", "--limit-s"]
        assert await asyncio.to_thread(recovery.main, [*asked, "60"]) == 0
        line = capsys.readouterr().out.splitlines()[0]
        parts = [part.split(" (+")[0].rpartition(" ")[0] for part in line.split(", ")[:-1]]
        assert {"noticed", "importing", "joined", "serving"} < set(parts)
        assert parts[-1] == "answered"
        assert await asyncio.to_thread(recovery.main, [*asked, "0.01"]) == 1
