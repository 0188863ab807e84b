"""`rollout-gateway simulate`, as a shell sees it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engines.errors import ConfigError
from gateway.cli.main import app
from tuning.plan.command import EXAMPLE_SHAPE

SMALL = (
    "--prompts",
    "16",
    "--response",
    "50:400",
    "--batches",
    "1",
    "--seeds",
    "2",
    "--sessions",
    "4",
    "--rounds",
    "1",
)
SIM = ("engine.kind=sim", "engine.num_replicas=2", "engine.max_num_seqs=8")


def rows(*args: str) -> dict[str, list[str]]:
    """Return the cells of the printed table by the name of the placement."""
    done = CliRunner().invoke(app, ["simulate", *args])
    assert done.exit_code == 0, done.output
    return {line[:40].split("  ")[0]: line.split() for line in done.stdout.splitlines() if line.strip()}


@pytest.mark.parametrize("workload", ["grpo", "agents", "mixed"])
def test_it_prints_placements_beside_each_other(workload: str) -> None:
    found = rows("--workload", workload, *SMALL, *SIM)
    assert "as configured" in found
    assert "round robin" in found
    assert "1.000" in found["as configured"]


def test_against_runs_the_same_workloads_with_other_keys() -> None:
    done = CliRunner().invoke(
        app, ["simulate", *SMALL, *SIM, "--against", "engine.num_replicas=1 engine.max_num_seqs=4", "--json"]
    )
    found = json.loads(done.stdout)
    fewer = "engine.num_replicas=1 engine.max_num_seqs=4"
    assert list(found) == ["as configured", fewer, "lengths unknown", "round robin"]
    assert found["engine.num_replicas=1 engine.max_num_seqs=4"]["of_first"] > 1.5
    assert len({seed["tokens"] for seeds in found.values() for seed in seeds["seeds"]}) == 2


def test_a_model_is_simulated_with_the_speed_that_is_fitted_to_a_gpu() -> None:
    found = rows(*SMALL, "--shape", EXAMPLE_SHAPE, "--gpu", "H100", "engine.model=m")
    assert "as configured" in found


def test_a_model_of_unknown_shape_is_refused_with_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"engines\.engine\.model = 'nowhere/m'.*give its numbers with --shape"):
        CliRunner().invoke(app, ["simulate", "engine.model=nowhere/m"], catch_exceptions=False)


def test_a_model_that_is_here_needs_no_shape() -> None:
    tiny = Path(__file__).parents[3] / "examples" / "tiny_model" / "digit-sort"
    assert "round robin" in rows(*SMALL, f"engine.model={tiny}", "engine.max_num_seqs=8")


def test_an_unknown_workload_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="--workload 'ppo': expected grpo, agents, mixed, or the file"):
        CliRunner().invoke(app, ["simulate", "--workload", "ppo", *SIM], catch_exceptions=False)


def test_a_session_without_room_for_a_turn_is_refused_with_the_room_it_needs() -> None:
    asked = ["--workload", "agents", "--max-context", "3000", "--first", "2000:3000", "--turn", "50:1000"]
    with pytest.raises(ConfigError, match=r"--max-context 3000: .* up to 4000 tokens .*; give 4000 or more"):
        CliRunner().invoke(app, ["simulate", *SIM, *asked], catch_exceptions=False)


def test_the_file_of_a_trace_is_replayed_once(tmp_path: Path) -> None:
    head = {"trace": 1, "began": 0.0, "block_tokens": 32, "content": False}
    prompt = {"tokens": 40, "blocks": ["00"]}
    line = {"session": None, "params": {"n": 2}, "prompts": [prompt] * 3, "status": 200, "seconds": 1.0}
    requests = [{**line, "at": at, "completion_tokens": 6 * 20} for at in (0.0, 30.0)]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, [head, *requests])))
    done = CliRunner().invoke(app, ["simulate", *SIM, "--workload", str(file), "--json"])
    [outcome] = json.loads(done.stdout)["as configured"]["seeds"]
    assert outcome["tokens"] == 2 * 6 * 20
    assert outcome["makespan_s"] > 30


def test_a_wrong_key_against_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.max_atempts"):
        CliRunner().invoke(
            app, ["simulate", *SMALL, *SIM, "--against", "gateway.max_atempts=1"], catch_exceptions=False
        )


def test_a_pool_runs_beside_batches_that_wait() -> None:
    found = rows(*SMALL, *SIM, "--batches", "3", "--pool", "24", "--max-staleness", "1")
    assert "pool of 24" in found


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--pool", "8"), "--pool 8 is less than the 16 --prompts"),
        (("--pool", "24", "--workload", "agents"), "only the workload grpo"),
        (("--max-staleness", "1"), "--max-staleness 1 is of a --pool"),
    ],
)
def test_a_pool_that_no_batch_can_come_from_is_refused(options: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(app, ["simulate", *SMALL, *SIM, *options])
    assert isinstance(done.exception, ConfigError)
    assert reason in str(done.exception)
