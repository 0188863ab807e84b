"""TRL: a few steps of GRPO, each on rollouts of two real vLLM replicas and followed by a weight sync."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")

from examples.tiny_model import task, train
from tests.rigs.engines.real_vllm import fleet
from tests.rigs.sorting import assert_engines_hold, run_trainer
from tests.running.client_records import runs_client, vllm_replicas

pytestmark = [pytest.mark.story, pytest.mark.vllm]


@runs_client("TRL GRPOTrainer", "trl", ran="digit-sorting, weights synced before each step", against=vllm_replicas(2))
def test_three_steps_leave_every_engine_with_the_trainers_last_weights(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with fleet(task.COMMITTED, tmp_path) as real:
        steps = run_trainer(real, tmp_path / "model", "--steps", "3")
        assert [step["step"] for step in steps] == [1, 2, 3]
        assert [step["weight_version"] for step in steps] == [1, 2, 3]
        furthest = max(abs(step["importance_ratio"] - 1) for step in steps)
        assert furthest < 0.001
        record_property("fact", f"importance ratio within {max(furthest, 1e-6):.0e} of 1")
        assert_engines_hold(real, tmp_path / "model")
    assert train.largest_difference(tmp_path / "model", task.COMMITTED) > 0
