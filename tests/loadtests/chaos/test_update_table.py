"""The table of faults in weight updates, in short: one transport on processes; the verdict on a row."""

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from loadtests.chaos.update_table import FAULTS, TRANSPORTS, Row, line, main
from sim.faults import Faults

ROW = Row(
    "store", "load", "replica killed", stale=0, mixed=0, lost=0, frozen=0, trainer_saw="200", flow_again_s=0.4,
    whole_again_s=5.6, by_next_update=False,
)  # fmt: skip


def test_every_step_of_every_transport_is_held_by_a_request_of_its_own() -> None:
    for transport in TRANSPORTS:
        steps = [moment.step for moment in transport.moments]
        assert len(steps) == len({moment.held for moment in transport.moments}) == len(set(steps)) > 1
    assert len(FAULTS) == 4
    assert "held" in Faults.model_fields


def test_a_row_without_a_finding_is_right() -> None:
    assert ROW.is_right
    assert line(ROW).startswith("store             load      replica killed   stale 0 mixed 0 lost 0 frozen 0")


@pytest.mark.parametrize("finding", [{"stale": 1}, {"mixed": 1}, {"lost": 1}, {"frozen": 1}, {"problem": "hung"}])
def test_a_row_with_a_finding_is_not(finding: dict[str, int]) -> None:
    assert not replace(ROW, **finding).is_right  # type: ignore[arg-type]


@pytest.mark.load
def test_a_trainer_killed_in_any_step_frees_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    assert main(["--transport", "flat, not staged", "--fault", "trainer killed", "--json", str(out)]) == 0, (
        capsys.readouterr().out
    )
    rows = orjson.loads(out.read_bytes())["rows"]
    assert [row["step"] for row in rows] == [moment.step for moment in TRANSPORTS[1].moments]
    assert all(row["trainer_saw"] == "-" for row in rows)
