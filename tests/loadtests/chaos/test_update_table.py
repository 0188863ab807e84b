"""The table of faults in weight updates, in short: one transport on processes."""

from pathlib import Path

import orjson
import pytest

from loadtests.chaos.update_table import FAULTS, TRANSPORTS, main
from sim.faults import Faults


def test_every_step_of_every_transport_is_held_by_a_request_of_its_own() -> None:
    for transport in TRANSPORTS:
        steps = [moment.step for moment in transport.moments]
        assert len(steps) == len({moment.held for moment in transport.moments}) == len(set(steps)) > 1
    assert len(FAULTS) == 4
    assert "held" in Faults.model_fields


@pytest.mark.load
def test_a_trainer_killed_in_any_step_frees_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    assert main(["--transport", "flat, not staged", "--fault", "trainer killed", "--json", str(out)]) == 0, (
        capsys.readouterr().out
    )
    rows = orjson.loads(out.read_bytes())["rows"]
    assert [row["step"] for row in rows] == [moment.step for moment in TRANSPORTS[1].moments]
    assert all(row["trainer_saw"] == "-" for row in rows)
