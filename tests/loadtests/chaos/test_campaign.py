"""Chaos on a real Ray cluster: three faults of updates. `make chaos` has every fault."""

from pathlib import Path

import orjson
import pytest

pytest.importorskip("ray")

from loadtests.chaos.campaign import main

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.parametrize(
    "faults",
    [
        ["replica killed during the transfer"],
        ["gateway killed in the middle", "replica loads other weights"],
    ],
)
def test_faults_of_updates_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], faults: list[str]) -> None:
    out = tmp_path / "out.json"
    status = main(["--replicas", "3", "--json", str(out), *(word for fault in faults for word in ("--fault", fault))])
    said = capsys.readouterr().out
    assert status == 0, said
    assert said.rstrip().endswith("lost 0, duplicated 0, stale 0, wrong 0, hung 0")
    assert [outcome["fault"] for outcome in orjson.loads(out.read_bytes())["faults"]] == faults
