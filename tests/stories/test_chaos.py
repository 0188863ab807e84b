"""Chaos in short: faults under rollouts. `make chaos` has every fault, and tests/loadtests/chaos those of updates."""

import pytest

from loadtests.chaos.campaign import main

pytestmark = pytest.mark.story


def test_a_killed_replica_its_process_and_a_killed_gateway_cost_no_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    faults = ["replica killed", "replica's process killed", "gateway killed and restarted"]
    status = main(["--fleet", "3", "--seconds", "4", *(word for fault in faults for word in ("--fault", fault))])
    said = capsys.readouterr().out
    assert status == 0, said
    assert said.rstrip().endswith("lost 0, duplicated 0, stale 0, wrong 0, hung 0")
