"""`rollout-gateway plan`, as a shell sees it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engines.errors import ConfigError
from gateway.cli.main import app
from gateway.config.load import load
from tuning.plan.command import EXAMPLE_SHAPE

TINY = Path(__file__).parents[3] / "examples" / "tiny_model" / "digit-sort"
SHORT = ("--prompt", "16:32", "--response", "16:64", "--gpu", "L4", "--gpus", "4")


def test_it_prints_a_table_and_writes_a_configuration_that_is_ready(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    done = CliRunner().invoke(app, ["plan", "-m", str(TINY), *SHORT, "--write", str(file)])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines()[3:8])) <= 120
    assert "TRL on " in done.stdout
    assert f"{file} is ready: rollout-gateway up -c {file}" in done.stderr
    assert load(file, environ={}).engine.model == str(TINY)


def test_json_has_every_choice_and_what_it_rests_on() -> None:
    done = CliRunner().invoke(app, ["plan", "-m", str(TINY), *SHORT, "--json"])
    found = json.loads(done.stdout)
    assert {"model", "gpu", "workload", "speeds", "choices"} <= set(found)
    assert found["choices"][0]["on_rank"]["tokens"] > 0


def test_without_a_model_it_says_what_to_give() -> None:
    with pytest.raises(
        ConfigError, match=r"give --model FOLDER, or numbers of its config\.json: --shape num_hidden_layers=28"
    ):
        CliRunner().invoke(app, ["plan"], catch_exceptions=False)


def test_the_example_shape_runs_anywhere() -> None:
    done = CliRunner().invoke(app, ["plan", "--shape", EXAMPLE_SHAPE])
    assert done.exit_code == 0, done.output
    assert "7.62 billion parameters" in done.stdout
    shown = CliRunner().invoke(app, ["plan", "--help"], terminal_width=400)
    assert EXAMPLE_SHAPE in shown.stdout.replace("\n", "").replace(" ", "")


def test_what_sliding_layers_hold_is_told_within_their_window_and_beyond() -> None:
    shape = f"{EXAMPLE_SHAPE},sliding_window=1024,sliding_window_pattern=2"
    done = CliRunner().invoke(app, ["plan", "--shape", shape])
    assert "56 KiB of KV cache a token up to 1,024 tokens, 28 beyond" in done.stdout


def test_a_colocated_plan_has_overrides_for_verl_and_no_file(tmp_path: Path) -> None:
    asked = ["plan", "--shape", EXAMPLE_SHAPE, "--colocated", "--nodes", "2", "--gpu", "H100"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "trainer.nnodes=2 \\\n    trainer.n_gpus_per_node=8 \\\n" in done.stdout
    with pytest.raises(ConfigError, match="--write with --colocated"):
        CliRunner().invoke(app, [*asked, "--write", str(tmp_path / "plan.yaml")], catch_exceptions=False)


def test_more_gpus_than_a_node_usually_has_are_said_to_be_one_node() -> None:
    options = ["--gpus", "16", "--trainer-gpus", "0", "--prompts", "16"]
    done = CliRunner().invoke(app, ["plan", "--shape", EXAMPLE_SHAPE, *options])
    assert "--gpus 16 is one node with links between all of them" in done.stdout
    assert "--gpus 8 --nodes 2" in done.stdout
