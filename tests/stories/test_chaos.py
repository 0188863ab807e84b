"""Chaos in short, on Ray Serve: a replica is killed during a weight transfer. `make chaos` has every fault."""

import pytest

pytest.importorskip("ray")

from loadtests.chaos.campaign import main

pytestmark = [pytest.mark.story, pytest.mark.ray]


def test_a_replica_killed_during_the_transfer_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--replicas", "2", "--fault", "replica killed during the transfer"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert said.rstrip().endswith("lost 0, duplicated 0, stale 0, hung 0")
