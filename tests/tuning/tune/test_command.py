"""`rollout-gateway tune` with simulated engines: processes, HTTP, files."""

import json
import subprocess
from pathlib import Path

import pytest

from gateway.config.load import load
from tests.rigs.shell import Shell

# Two sequences at a time take eight times the steps of sixteen, and steps most of the time, on a busy machine too; a
# batch of 8,192 tokens leaves no memory.
CONFIG = """
gateway: {port: 8123}
engine:
  kind: sim
  num_replicas: 2
  max_num_seqs: 2
  sim: {decode_step_s: 0.05, kv_tokens: 5000}
"""
SMALL = (
    "--prompts", "8", "-n", "2", "--prompt", "8", "--response", "8", "--lever", "max_num_seqs=2,16,9000",
    "--pairs", "2", "--budget", "300s",
)  # fmt: skip


def tune(shell: Shell, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (shell.folder / "sim.yaml").write_text(CONFIG)
    return shell.run("tune", "-c", "sim.yaml", *SMALL, *arguments, f"engine.log_dir={shell.folder / 'logs'}")


@pytest.mark.load
def test_it_ends_with_the_best_configuration_and_its_evidence(tmp_path: Path) -> None:
    done = tune(Shell(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "take max_num_seqs=16" in done.stdout
    assert "times the start's tokens/s, too far ahead to need pairs" in done.stdout
    assert "do not fit in 5000 KV tokens" in done.stdout, "a setting that does not start is a finding"

    best = load(tmp_path / "tune" / "best.yaml", environ={})
    assert (best.engine.max_num_seqs, best.engine.num_replicas, best.gateway.port) == (16, 2, 8123)

    found = json.loads((tmp_path / "tune" / "evidence.json").read_text())
    assert found["best"]["max_num_seqs"] == 16


@pytest.mark.load
def test_sequences_that_the_engine_does_not_hold_are_refused(tmp_path: Path) -> None:
    done = tune(Shell(tmp_path), "--engine.max_model_len=12")
    assert done.returncode == 1
    assert "the workload has sequences of 16 tokens, and the engine's max_model_len is 12" in done.stderr


@pytest.mark.load
def test_without_a_model_nothing_is_started(tmp_path: Path) -> None:
    done = Shell(tmp_path).run("tune")
    assert done.returncode == 1
    assert "engine.model is missing: give a file with it, -c FILE" in done.stderr
    assert not (tmp_path / "tune").exists()
