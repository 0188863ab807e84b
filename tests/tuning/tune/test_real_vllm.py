"""`rollout-gateway tune` on real vLLM engines on CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config.load import load

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCRIPT = Path(sys.executable).with_name("rollout-gateway")
ROOT = Path(__file__).parents[3]


def test_it_tunes_a_real_engine_within_its_budget(tmp_path: Path) -> None:
    """One sequence at a time is far from the best."""
    command = [
        str(SCRIPT), "tune", "-c", str(ROOT / "examples" / "tiny-cpu.yaml"), "--out", str(tmp_path / "out"), "--json",
        "--prompts", "8", "-n", "2", "--prompt", "16:32", "--response", "32:64", "--pairs", "1", "--budget", "900s",
        "--lever", "max_num_seqs=16", "engine.max_num_seqs=1", f"engine.log_dir={tmp_path / 'logs'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["spent_s"] <= 900
    start, tried = found["measured"]
    assert (start["setting"], tried["setting"]) == ({}, {"max_num_seqs": 16})
    assert start["speeds"][0] > 0
    best = load(tmp_path / "out" / "best.yaml", environ={})
    assert best.engine.max_num_seqs == found["best"].get("max_num_seqs", 1)
    assert best.engine.model == str(ROOT / "examples" / "tiny_model" / "digit-sort")
