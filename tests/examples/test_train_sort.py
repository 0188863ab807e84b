"""TRL's own trainer on the digit-sorting task, against two real vLLM replicas behind the gateway."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")

from transformers import AutoTokenizer

from examples.tiny_model import task, train
from tests.real_vllm import RealFleet, fleet, greedy_token_ids

STEPS = 36
RISE, FLAT = 0.15, 0.08


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealFleet]:
    with fleet(train.COMMITTED, tmp_path) as running:
        yield running


@pytest.mark.vllm
def test_three_steps_leave_every_engine_with_the_trainers_last_weights(real: RealFleet, tmp_path: Path) -> None:
    steps = run_trainer(real, tmp_path / "model", "--steps", "3")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["weight_version"] for step in steps] == [1, 2, 3]
    assert all(abs(step["importance_ratio"] - 1) < 0.001 for step in steps)
    assert_engines_hold(real, tmp_path / "model")
    assert train.largest_difference(tmp_path / "model", train.COMMITTED) > 0


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_the_reward_rises_with_weight_sync_and_only_with_it(real: RealFleet, tmp_path: Path, seed: int) -> None:
    cut_off = run_trainer(real, tmp_path / "cut", "--steps", str(STEPS), "--seed", str(seed), "--no-sync")
    assert abs(rise(cut_off)) < FLAT
    synced = run_trainer(real, tmp_path / "model", "--steps", str(STEPS), "--seed", str(seed))
    assert rise(synced) > RISE
    assert all(abs(step["importance_ratio"] - 1) < 0.001 for step in synced)
    assert_engines_hold(real, tmp_path / "model")


def run_trainer(real: RealFleet, out: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "examples.train_sort", "--url", real.url, "--out", str(out), *options]
    trained = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert trained.returncode == 0, trained.stderr[-2000:]
    return [json.loads(line) for line in trained.stdout.splitlines() if line.startswith('{"step"')]


def rise(steps: list[dict[str, Any]]) -> float:
    """Mean reward of the last 8 steps over that of the first 4."""
    rewards = [step["reward"] for step in steps]
    return statistics.fmean(rewards[-8:]) - statistics.fmean(rewards[:4])


def assert_engines_hold(real: RealFleet, model: Path) -> None:
    """All replicas are at one version, and answer greedily as transformers does with the trainer's final weights."""
    versions = {replica["weight_version"] for replica in real.call("/status")[1]["replicas"]}
    assert len(versions) == 1
    asked = list(islice(task.problems(seed=9), 8))
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [task.prompt_token_ids(tokenizer, problem) for problem in asked]
    expected = task.greedy_token_ids(str(model), asked)
    for replica in real.replicas:
        assert greedy_token_ids(replica.url, prompts, task.MAX_ANSWER_TOKENS) == expected
