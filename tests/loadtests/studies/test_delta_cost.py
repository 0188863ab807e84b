"""A version as a delta beside the same one whole."""

from pathlib import Path

import orjson
import pytest

from loadtests.studies import delta_cost
from loadtests.studies.delta_cost import Cost, main, summarise


def cost(pair: int, delta: bool, written: int, push_s: float = 1.0) -> Cost:
    return Cost(
        pair=pair, changed=0.01, delta=delta, written=written, received=written, push_s=push_s, push_cpu_s=1.0,
        push_gateway_cpu_s=1.0, fetch_s=1.0, fetch_cpu_s=1.0, fetch_gateway_cpu_s=1.0,
    )  # fmt: skip


def test_ratios_are_medians_of_pairs() -> None:
    deltas = [cost(0, True, 10, 2.0), cost(1, True, 20, 3.0), cost(2, True, 30, 1.0)]
    wholes = [cost(0, False, 100, 1.0), cost(1, False, 100, 1.0), cost(2, False, 100, 2.0)]
    (row,) = summarise([*deltas, *wholes])
    assert row["written"] == {"delta": 20, "whole": 100, "ratio": pytest.approx(0.2)}
    assert row["push_s"] == {"delta": 2.0, "whole": 1.0, "ratio": 2.0}


def test_there_is_no_ratio_to_a_whole_version_that_cost_nothing_measurable() -> None:
    deltas, wholes = [cost(0, True, 10, 2.0)], [cost(0, False, 100, 0.0)]
    (row,) = summarise([*deltas, *wholes])
    assert row["push_s"] == {"delta": 2.0, "whole": 0.0, "ratio": None}


@pytest.mark.load
def test_a_run_writes_each_version_and_what_a_delta_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(delta_cost, "_VOCABULARY", 1000)
    report = tmp_path / "report.json"
    told = ["--changed", "0.01", "--pairs", "1", "--layers", "1", "--store", str(tmp_path), "--json", str(report)]
    assert main(told) == 0
    (row,) = orjson.loads(report.read_bytes())["summary"]
    assert row["written"]["ratio"] < 0.02
    assert row["received"]["ratio"] < 0.02
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
