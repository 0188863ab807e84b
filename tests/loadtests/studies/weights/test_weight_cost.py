"""The cost of updates beside a steady load, and of refused ones."""

from pathlib import Path

import orjson
import pytest

from loadtests.studies.weights.pusher import Flaw
from loadtests.studies.weights.weight_cost import Restore, Window, main, summarise


def test_the_work_lost_by_an_update_is_what_windows_with_updates_lack() -> None:
    windows = [Window(0, 15, False, 1000), Window(15, 55, True, 990), Window(55, 70, False, 1000)]
    records = [
        {"stopped_s": stopped_s, "staged": True, "seconds": {"transfer": 0.5, "canary": 0.1}}
        for stopped_s in (0.1, 0.2, 0.6)
    ]
    row = summarise(windows, records, every_s=10.0)
    assert row["lost_s"] == pytest.approx(0.1)
    assert (row["updates"], row["staged"], row["stopped_s"], row["stopped_s_max"]) == (3, 3, 0.2, 0.6)
    assert row["seconds"] == {"transfer": 0.5, "canary": 0.1}


def test_a_refused_update_is_reported_with_its_stop_and_the_way_back() -> None:
    undone = Restore(Flaw.LOGPROBS, 0.06, 0.04, 2, staged=True, stopped_s=0.05, error="refused", source="kept weights")
    assert str(undone) == (
        "refused (staged, canary): generation stopped for 0.050 s, "
        "and back at version 2 from kept weights after 0.040 s, with its first completion after 0.060 s"
    )


@pytest.mark.load
def test_a_fleet_is_measured_with_updates_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    status = main(
        ["-c", "examples/sim.yaml", "--transport", "store", "--variant", "together", "--variant",
         "rolling: weights.rolling=true", "--pairs", "1", "--restores", "1", "--streams", "2", "--max-tokens", "64",
         "--prompt-tokens", "8", "--quiet-s", "2", "--updates-s", "4", "--every-s", "2", "--warm-s", "1",
         "--json", str(out), "gateway.port=0", f"weights.store={tmp_path / 'store'}", "engine.num_replicas=2",
         "engine.sim.decode_step_s=0.02",  # so that a slow machine does not make one window twice as fast as another
         f"engine.log_dir={tmp_path}"]
    )  # fmt: skip
    told = capsys.readouterr()
    assert status == 0, told
    report = orjson.loads(out.read_bytes())
    assert report["bytes"] == 64
    together, rolling = report["variants"]["together"], report["variants"]["rolling"]
    # The second gateway finds the first one's version. A rolling update leaves a replica that serves meanwhile.
    for variant, version, sources in ((together, 4, ["store"]), (rolling, 8, ["", "store"])):
        assert [one["has_updates"] for one in variant["windows"]] == [False, True, False]
        assert all(one["rate"] > 0 for one in variant["windows"])
        assert variant["summary"]["updates"] == 2
        (restore,) = variant["restores"]
        assert restore["version"] == version
        assert "canary" in restore["error"]
        assert restore["source"] in sources
    assert "costs" in told.out
