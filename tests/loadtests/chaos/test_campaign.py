"""Chaos on a real Ray cluster: two faults. `make chaos` has every fault, tests/stories/test_chaos.py has another."""

from pathlib import Path

import orjson
import pytest

pytest.importorskip("ray")

from loadtests.chaos.campaign import main

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_killed_gateway_and_a_killed_replica_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    faults = ["gateway killed in the middle", "replica killed in a rolling update"]
    status = main(["--replicas", "3", "--json", str(out), *(word for fault in faults for word in ("--fault", fault))])
    assert status == 0
    assert capsys.readouterr().out.rstrip().endswith("lost 0, duplicated 0, stale 0, wrong 0, hung 0")
    assert [outcome["fault"] for outcome in orjson.loads(out.read_bytes())["faults"]] == faults
