"""TRL's own trainer on the digit-sorting task, against two real vLLM replicas behind the gateway."""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")

from transformers import AutoTokenizer

from examples.tiny_model import task, train
from tests.rigs.real_vllm import RealFleet, fleet, greedy_token_ids
from tests.running.client_records import runs_client, vllm_replicas

pytestmark = pytest.mark.vllm

STEPS = 36
RISE, FLAT = 0.15, 0.08
RUN_S, SOON_S = 600.0, 60.0


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealFleet]:
    with fleet(task.COMMITTED, tmp_path) as running:
        yield running


GRPO = runs_client(
    "TRL GRPOTrainer", "trl", ran="digit-sorting, weights synced before each step", against=vllm_replicas(2)
)


@GRPO
def test_three_steps_leave_every_engine_with_the_trainers_last_weights(
    real: RealFleet, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    steps = run_trainer(real, tmp_path / "model", "--steps", "3")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["weight_version"] for step in steps] == [1, 2, 3]
    furthest = max(abs(step["importance_ratio"] - 1) for step in steps)
    assert furthest < 0.001
    record_property("fact", f"importance ratio within {max(furthest, 1e-6):.0e} of 1")
    assert_engines_hold(real, tmp_path / "model")
    assert train.largest_difference(tmp_path / "model", task.COMMITTED) > 0


@GRPO
@pytest.mark.slow
def test_a_replica_killed_in_the_middle_does_not_end_the_run_and_its_successor_catches_up(
    real: RealFleet, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seen: list[dict[str, Any]] = []

    def kill_one(step: dict[str, Any]) -> None:
        seen.append(step)
        if step["step"] == 2:
            kill_while_it_generates(real, 1)
        if step["step"] == 5:
            real.restart(1)

    run_trainer(real, tmp_path / "model", "--steps", "8", on_step=kill_one)
    assert [step["step"] for step in seen] == list(range(1, 9))
    assert [step["weight_version"] for step in seen] == list(range(1, 9))
    assert all(abs(step["importance_ratio"] - 1) < 0.001 for step in seen)
    wait_until_all_serve(real, version=9)
    assert_engines_hold(real, tmp_path / "model")
    record_property("fact", "a replica killed -9 while it generated did not end the run")


@GRPO
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_the_reward_rises_with_weight_sync_and_only_with_it(
    real: RealFleet, tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    cut_off = run_trainer(real, tmp_path / "cut", "--steps", str(STEPS), "--seed", str(seed), "--no-sync")
    assert abs(rise(cut_off)) < FLAT
    synced = run_trainer(real, tmp_path / "model", "--steps", str(STEPS), "--seed", str(seed))
    assert rise(synced) > RISE
    record_property("fact", f"reward {rise(synced):+.2f} over {STEPS} steps")
    assert all(abs(step["importance_ratio"] - 1) < 0.001 for step in synced)
    assert_engines_hold(real, tmp_path / "model")


def run_trainer(
    real: RealFleet, out: Path, *options: str, on_step: Callable[[dict[str, Any]], None] = lambda _: None
) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "examples.train_sort", "--url", real.url, "--out", str(out), *options]
    steps, log = [], out.parent / f"{out.name}.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as trainer,
    ):
        overdue = threading.Timer(RUN_S, trainer.kill)
        overdue.start()
        try:
            assert trainer.stdout is not None
            for line in trainer.stdout:
                if line.startswith('{"step"'):
                    steps.append(json.loads(line))
                    on_step(steps[-1])
            code = trainer.wait()
        finally:
            overdue.cancel()
            trainer.kill()
    assert code == 0, log.read_text()[-2000:]
    return steps


def kill_while_it_generates(real: RealFleet, index: int) -> None:
    deadline = time.monotonic() + SOON_S
    while real.call("/status")[1]["replicas"][index]["samples_in_flight"] == 0:
        assert time.monotonic() < deadline, real.call("/status")
        time.sleep(0.005)
    os.kill(real.replicas[index].pid, signal.SIGKILL)  # its guard ends the rest of it


def wait_until_all_serve(real: RealFleet, version: int) -> None:
    deadline = time.monotonic() + SOON_S
    everyone = [("SERVING", version)] * len(real.replicas)  # one that is started anew is not listed yet
    while [(one["state"], one["weight_version"]) for one in real.call("/status")[1]["replicas"]] != everyone:
        assert time.monotonic() < deadline, real.call("/status")
        time.sleep(0.2)


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
