"""The study of goodput on a fleet of simulated engines."""

import argparse
from pathlib import Path

import pytest

from engines.config import SimConfig
from loadtests.chaos.process_fleet import ProcessFleet, fleet_config, healthy_within, running
from loadtests.studies.goodput import study

pytestmark = pytest.mark.load

BOUND_S = 60.0


async def test_streams_go_on_while_engines_are_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = ProcessFleet(fleet_config("goodput", 2, SimConfig(decode_step_s=0.002), tmp_path), tmp_path)
    async with running(fleet):
        await healthy_within(fleet.url, BOUND_S)
        asked = {"streams": 4, "prompt_tokens": 10, "tokens": 50, "vocabulary": 900, "signal": "KILL"}
        times = {"every_s": 2.0, "seconds": 2.0, "quiet_s": 1.0, "warm_s": 1.0}
        assert await study(argparse.Namespace(url=fleet.url, **asked, **times)) == 0
    told = capsys.readouterr().out
    assert "1 engines hurt; goodput" in told
    assert " 0 failed or of another length" in told
