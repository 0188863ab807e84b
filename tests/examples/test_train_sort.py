"""TRL's own trainer on the digit-sorting task, against a real vLLM."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")

from transformers import AutoTokenizer

from examples.tiny_model import task, train
from tests.real_vllm import greedy_token_ids, served


@pytest.mark.vllm
def test_three_steps_leave_the_engine_with_the_trainers_last_weights(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with served(train.COMMITTED, tmp_path) as url:
        command = [sys.executable, "-m", "examples.train_sort", "--url", url, "--out", str(out), "--steps", "3"]
        trained = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert trained.returncode == 0, trained.stderr[-2000:]
        steps = [json.loads(line) for line in trained.stdout.splitlines() if line.startswith('{"step"')]
        assert [step["step"] for step in steps] == [1, 2, 3]
        assert all(abs(step["importance_ratio"] - 1) < 0.001 for step in steps)

        asked = list(islice(task.problems(seed=9), 8))
        tokenizer = AutoTokenizer.from_pretrained(out)
        prompts = [task.prompt_token_ids(tokenizer, problem) for problem in asked]
        assert greedy_token_ids(url, prompts, task.MAX_ANSWER_TOKENS) == task.greedy_token_ids(str(out), asked)
    assert train.largest_difference(out, train.COMMITTED) > 0
