"""Levers side by side: variants in waves over the GPUs, compared with the first of their wave."""

from pathlib import Path

import orjson
import pytest

from engines.errors import ConfigError
from loadtests.studies.levers import Measure, Variant, main, summarise, waves

SIM = "engine.kind=sim engine.sim.decode_step_s=0.0005"


def measure(variant: str, wave: int, tokens: int, gpus: int = 1) -> Measure:
    return Measure(
        variant=variant, load="64", wave=wave, run=0, gpus=gpus, wall_s=1.0, completions=1, tokens=tokens,
        median_latency_s=0.1, p99_latency_s=0.2, client_busy=0.1, errors=[],
    )  # fmt: skip


def variant(name: str, gpus: int) -> Variant:
    return Variant.parse(f"{name}: engine.device=cuda engine.kind=sglang engine.num_replicas={gpus}", None)


def test_as_many_variants_run_at_a_time_as_gpus_are_there() -> None:
    variants = [variant("a", 1), variant("b", 1), variant("c", 2), variant("d", 1), variant("e", 2)]
    assert [[one.name for one in wave] for wave in waves(variants, 4)] == [["a", "b", "c"], ["d", "e"]]


def test_a_variant_that_needs_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="'b' needs more than the 2 GPUs"):
        waves([variant("a", 1), variant("b", 3)], 2)


def test_a_variant_is_set_against_the_first_of_its_own_wave() -> None:
    rows = summarise([measure("a", 0, 100), measure("b", 0, 150), measure("a", 1, 50), measure("c", 1, 50)])
    assert [(row["variant"], row["against_first"]) for row in rows] == [("a", 1), ("b", 1.5), ("a", 1), ("c", 1)]


def test_speed_is_per_gpu() -> None:
    rows = summarise([measure("one", 0, 100), measure("pair", 0, 100, gpus=2)])
    assert [row["tokens_per_s_per_gpu"] for row in rows] == [100, 50]


@pytest.mark.load
def test_engines_that_differ_in_a_lever_are_measured_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    log = f"engine.log_dir={tmp_path}"
    status = main(
        ["--variant", f"fast: {SIM} {log}", "--variant", f"slow: {SIM} {log} engine.sim.decode_step_s=0.05",
         "--streams", "4", "--max-tokens", "20", "--runs", "2", "--json", str(out)]
    )  # fmt: skip
    report = orjson.loads(out.read_bytes())
    assert status == 0
    fast, slow = report["summary"]
    assert (fast["variant"], slow["variant"]) == ("fast", "slow")
    assert slow["against_first"] < 0.8
    assert len(report["measures"]) == 4
    assert "against first" in capsys.readouterr().out


@pytest.mark.load
def test_an_engine_that_does_not_start_is_reported_and_the_others_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    log = f"engine.log_dir={tmp_path}"
    status = main(
        ["--variant", f"good: {SIM} {log}", "--variant", f"bad: {SIM} {log} engine.extra.no_such=1",
         "--streams", "2", "--max-tokens", "8", "--runs", "1", "--json", str(out)]
    )  # fmt: skip
    report = orjson.loads(out.read_bytes())
    assert status == 1
    assert [row["variant"] for row in report["summary"]] == ["good"]
    assert "no-such" in report["variants"][1]["failure"]
