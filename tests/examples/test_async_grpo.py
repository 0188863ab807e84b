"""The reference trainer of one's own on the digit-sorting task, against two real vLLM replicas behind the gateway."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("vllm")

from examples.tiny_model import task, train
from tests.rigs.engines.real_vllm import RealFleet, fleet
from tests.rigs.sorting import assert_engines_hold, rise

pytestmark = pytest.mark.vllm

STEPS = 36
RISE = 0.15
RATIO_ERROR = 1e-3


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealFleet]:
    with fleet(task.COMMITTED, tmp_path) as running:
        yield running


def test_a_trainer_that_waits_for_each_batch_is_on_policy(real: RealFleet, tmp_path: Path) -> None:
    steps = run_trainer(real, tmp_path / "model", "--steps", "3", "--staleness", "0")
    assert [step["weight_version"] for step in steps] == [2, 3, 4]
    assert [step["staleness"] for step in steps] == [0, 0, 0]
    assert [step["on_policy"] for step in steps] == [1.0, 1.0, 1.0]
    assert all(step["on_policy_error"] < RATIO_ERROR for step in steps)
    assert_engines_hold(real, tmp_path / "model")
    assert train.largest_difference(tmp_path / "model", task.COMMITTED) > 0


@pytest.mark.slow
def test_the_reward_rises_one_step_off_policy(real: RealFleet, tmp_path: Path) -> None:
    steps = run_trainer(real, tmp_path / "model", "--steps", str(STEPS))
    assert rise(steps) > RISE
    assert {step["staleness"] for step in steps} == {0, 1}
    assert steps[0]["on_policy"] == 1.0
    on_policy = [step["on_policy_error"] for step in steps if step["on_policy"]]
    assert all(error < RATIO_ERROR for error in on_policy)
    off_policy = [step for step in steps if step["on_policy"] < 1]
    assert len(off_policy) > STEPS / 2
    assert max(abs(step["importance_ratio"] - 1) for step in off_policy) > 1e-5, "older weights give other ratios"
    assert_engines_hold(real, tmp_path / "model")


def run_trainer(real: RealFleet, out: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "examples.async_grpo", "--url", real.url, "--out", str(out), *options]
    trained = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert trained.returncode == 0, trained.stderr[-2000:]
    return [json.loads(line) for line in trained.stdout.splitlines() if line.startswith('{"step"')]
