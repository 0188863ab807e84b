"""The cost of updates beside a steady load, and of refused ones."""

from pathlib import Path

import orjson
import pytest

from loadtests.studies.weights.weight_cost import main


@pytest.mark.load
@pytest.mark.slow
def test_a_fleet_is_measured_with_updates_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    status = main(
        ["-c", "examples/sim.yaml", "--transport", "store", "--variant", "together", "--variant",
         "recomputed: weights.in_flight=recompute",
         "--pairs", "1", "--restores", "1", "--streams", "2", "--max-tokens", "64",
         "--prompt-tokens", "8", "--quiet-s", "2", "--updates-s", "4", "--every-s", "2", "--warm-s", "1",
         "--json", str(out), "gateway.port=0", f"weights.store={tmp_path / 'store'}", "engine.num_replicas=2",
         "engine.sim.decode_step_s=0.02",  # so that a slow machine does not make one window twice as fast as another
         f"engine.log_dir={tmp_path}"]
    )  # fmt: skip
    told = capsys.readouterr()
    assert status == 0, told
    report = orjson.loads(out.read_bytes())
    assert report["bytes"] == 64
    together, recomputed = report["variants"]["together"], report["variants"]["recomputed"]
    # The second gateway finds the first one's version.
    for variant, version in ((together, 4), (recomputed, 8)):
        assert [one["has_updates"] for one in variant["windows"]] == [False, True, False]
        assert all(one["rate"] > 0 for one in variant["windows"])
        assert variant["summary"]["updates"] == 2
        (restore,) = variant["restores"]
        assert restore["version"] == version
        assert "canary" in restore["error"]
    assert "costs" in told.out
