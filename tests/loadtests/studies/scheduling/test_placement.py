"""Old and new placement before the same engines: the alternation, the ratios, and failures."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtests.studies.scheduling.placement import Run, Side, main, summarise, table

SIM = (
    "engine.kind=sim", "engine.num_replicas=2", "engine.max_num_seqs=2", "engine.sim.decode_step_s=0.0005",
    "engine.sim.kv_tokens=400",
)  # fmt: skip
AGENTS = (
    "--workload", "agents", "--sessions", "3", "--rounds", "1", "--turns", "2", "--first", "20", "--turn", "4",
    "--tool", "8", "--tool-s", "0.01", "--max-context", "200",
)  # fmt: skip
GROUPS = (
    "--workload", "groups", "--together", "2", "--prompts", "3", "--samples", "4", "--prompt", "8",
    "--response", "8:40",
)  # fmt: skip
BATCH = ("--workload", "batch", "--prompts", "12", "--samples", "2", "--prompt", "8", "--response", "8:40")


def run(pair: int, side: Side, wall_s: float, *, tokens: int = 1000, errors: int = 0) -> Run:
    return Run(
        pair=pair, side=side, wall_s=wall_s, tokens=tokens, p99_s=1.0, cached=None, preempted=0.0,
        errors=["refused"] * errors,
    )  # fmt: skip


def test_runs_are_compared_with_that_of_their_pair() -> None:
    runs = [run(0, Side.OLD, 10), run(0, Side.NEW, 5), run(1, Side.NEW, 10), run(1, Side.OLD, 40)]
    ratio = summarise(runs)["ratio"]
    assert ratio == {"tokens_per_s": 3.0, "lower_bound_95": 2.0, "pairs": [2.0, 4.0], "time": 0.375}
    assert "new over old: tokens/s 3.000 >= 2.000 (pairs 2.000, 4.000), time 0.375" in table(summarise(runs))


def test_errors_are_counted_and_a_side_that_delivered_nothing_has_no_ratio() -> None:
    summary = summarise([run(0, Side.OLD, 10), run(0, Side.NEW, 5, tokens=0, errors=2)])
    assert (summary["old"]["errors"], summary["new"]["errors"], summary["ratio"]) == (0, 2, None)
    assert table(summary).splitlines()[-1].split() == ["new", "1", "5.00", "0", "1.00", "-", "0", "2"]


def measured(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out.json"
    status = main([*SIM, f"engine.log_dir={tmp_path}", "--pairs", "2", "--json", str(out), *words])
    return status, orjson.loads(out.read_bytes())


@pytest.mark.load
@pytest.mark.parametrize("workload", [AGENTS, BATCH, GROUPS])
def test_both_placements_have_the_same_engines_and_the_same_work(tmp_path: Path, workload: tuple[str, ...]) -> None:
    status, report = measured(tmp_path, *workload)
    assert status == 0, report
    assert report["kv_tokens"] == [400, 400]
    assert [(one["pair"], one["side"]) for one in report["runs"]] == [(0, "old"), (0, "new"), (1, "new"), (1, "old")]
    first, second, third, fourth = (one["tokens"] for one in report["runs"])
    assert first == second > 0
    assert third == fourth > 0
    assert len(report["summary"]["ratio"]["pairs"]) == 2
    assert sum(summary_errors(report)) == 0


@pytest.mark.load
def test_a_failed_request_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = measured(tmp_path, *BATCH, "--prompt", "60:200", "engine.max_model_len=64")
    assert status == 1
    assert min(summary_errors(report)) > 0
    assert any("status 400" in error for one in report["runs"] for error in one["errors"])
    assert "status 400" in capsys.readouterr().err


def summary_errors(report: dict[str, Any]) -> list[int]:
    return [report["summary"][side]["errors"] for side in ("old", "new")]


def test_lengths_that_are_none_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*SIM, f"engine.log_dir={tmp_path}", "--workload", "batch", "--response", "much"]) == 2
    assert "--response 'much': expected MEAN:MAX" in capsys.readouterr().err
