"""The cost of an update: a run with it against a run without, and the broadcast alone."""

from pathlib import Path

import orjson
import pytest

from loadtests.studies.weights.pusher import Flaw, Pushed
from loadtests.studies.weights.weight_cost import Restore, Run, main, steps_of, summarise


def run(pair: int, kind: str, wall_s: float, stopped_s: float = 0.0, error: str = "", ended: float = 100.0) -> Run:
    is_quiet = kind == "quiet"
    record = {
        "started": "1970-01-01T00:00:10+00:00", "age_s": 2.0, "stopped_s": stopped_s, "staged": True,
        "seconds": {"transfer": 0.5, "canary": 0.1},
    }  # fmt: skip
    return Run(
        pair=pair, is_quiet=is_quiet, wall_s=wall_s, ended=ended, tokens=1000, errors=[error] if error else [],
        pushed=[] if is_quiet else [Pushed(seconds=0.7, version=1, error=error)] * 2,
        updates=[] if is_quiet else [record] * 2,
    )  # fmt: skip


def test_the_work_lost_is_what_the_run_beside_it_did_not_take_by_update() -> None:
    runs = [run(0, "quiet", 10.0), run(0, "updates", 10.4, 0.2), run(1, "updates", 12.2, 0.3), run(1, "quiet", 12.0)]
    row = summarise("flat", runs, num_bytes=2_000_000_000)
    assert row["lost_s"] == pytest.approx(0.15)
    assert row["lost_tokens"] == pytest.approx(0.15 * (1000 / 10 + 1000 / 12) / 2)
    assert (row["updates"], row["stopped_s"], row["stopped_s_max"]) == (4, 0.25, 0.3)
    assert row["moved_gb_per_s"] == pytest.approx(4.0)
    assert row["seconds"] == {"transfer": 0.5, "canary": 0.1}
    assert steps_of(row) == "flat: 4 of 4 staged; transfer 0.500, canary 0.100 s"


def test_a_refused_update_is_reported_with_its_stop_and_the_way_back() -> None:
    error = "WeightUpdateFailed: the trainer gives up"
    half = Restore(Flaw.HALF, 0.004, 0.0, 2, staged=True, beside=True, stopped_s=0.0, error=error, source="")
    assert half.told() == (
        "refused (staged, half sent): generation stopped for 0.000 s, and back at version 2 after 0.000 s, "
        "with its first completion after 0.004 s"
    )
    undone = Restore(
        Flaw.LOGPROBS, 0.06, 0.04, 2, staged=True, beside=False, stopped_s=0.05, error=error, source="kept weights"
    )
    assert undone.told() == (
        "refused (staged, after the load, canary): generation stopped for 0.050 s, "
        "and back at version 2 from kept weights after 0.040 s, with its first completion after 0.060 s"
    )


@pytest.mark.load
def test_a_fleet_is_measured_with_updates_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    status = main(
        ["-c", "examples/sim.yaml", "--variant", "together: transport=store", "--variant",
         "rolling: transport=store weights.rolling=true", "--pairs", "1",
         "--updates", "1", "--restores", "1", "--streams", "2", "--rounds", "1", "--max-tokens", "64",
         "--prompt-tokens", "8",
         "--json", str(out), "gateway.port=0", f"weights.store={tmp_path / 'store'}", "engine.num_replicas=2",
         "engine.sim.decode_step_s=0.02",  # so that a slow machine does not make one run twice as long as another
         f"engine.log_dir={tmp_path}"]
    )  # fmt: skip
    assert status == 0, capsys.readouterr().err
    report = orjson.loads(out.read_bytes())
    together, rolling = report["variants"]
    assert (together["name"], rolling["settings"]) == ("together", ["weights.rolling=true"])
    # The second gateway finds the first one's version. A rolling update leaves a replica that serves meanwhile.
    for variant, version, sources in ((together, 3, ["store"]), (rolling, 6, ["", "store"])):
        row = variant["summary"]
        assert row["updates"] + row["late"] == 1
        assert row["push_s"] > 0
        assert [one["is_quiet"] for one in variant["runs"]] == [True, False]
        (restore,) = variant["restores"]
        assert restore["version"] == version
        assert "canary" in restore["error"]
        assert restore["source"] in sources
        assert variant["restore_errors"] == []
    assert report["bytes"] == 64
    assert "work lost s" in capsys.readouterr().out
