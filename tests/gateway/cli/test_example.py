"""`rollout-gateway example`: what it writes out, and what it lists."""

import os
from pathlib import Path

import pytest

from gateway.config.load import load
from tests.rigs.shell import NearShell


def test_examples_come_with_titles_and_run_from_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = NearShell(tmp_path).run("example")
    assert done.returncode == 0
    titles = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert titles["examples/sim.yaml"] == "Four simulated engines"
    assert titles["examples/verl_cpu.sh"].startswith("verl's own GRPO trainer on CPU")
    monkeypatch.chdir(tmp_path)
    assert load(Path("examples/tiny-cpu.yaml")).groups["engine"].num_replicas == 2
    assert os.access("examples/verl_cpu.sh", os.X_OK)
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "examples" / "sim.yaml"
    mine.parent.mkdir()
    mine.write_text("# Mine\n")
    assert NearShell(tmp_path).run("example").returncode == 0
    assert mine.read_text() == "# Mine\n"
