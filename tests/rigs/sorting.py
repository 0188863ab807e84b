"""Runs of examples/train_sort.py as a process, and the state of the engines that they trained."""

import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from examples.tiny_model import task
from tests.rigs.engines.real_vllm import RealFleet, greedy_token_ids

RUN_S = 600.0


def run_trainer(
    real: RealFleet, out: Path, *options: str, on_step: Callable[[dict[str, Any]], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Return the trainer's reports of its steps; `on_step` gets each as it comes. Its model is left in `out`."""
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
