"""verl's own main_ppo, as examples/verl_cpu.sh has it, against real vLLM replicas on CPU. One of them is killed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.verl_run import LARGEST_DIFFERENCE, Run, fleet, up
from tests.running.client_records import runs_client

pytestmark = pytest.mark.verl

STEPS = 3


def largest_move(update: dict[str, Any]) -> float:
    """How far the canary found an update to move a replica's log-probs, in nats a token."""
    return max(found["canary"].get("to_previous", 0.0) for found in update["replicas"].values() if "canary" in found)


@runs_client(
    "verl main_ppo",
    "verl",
    ran="examples/verl_cpu.sh: GRPO, weights synced after each step, a replica killed",
    against="2 x vLLM, CPU",
)
def test_grpo_steps_through_a_gateway_outlive_a_killed_replica(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with fleet(tmp_path) as served:
        run = Run("verl_cpu.sh", tmp_path, served.url, f"trainer.total_training_steps={STEPS}")
        try:
            run.steps(1)
            os.kill(served.pids[0], signal.SIGKILL)  # the rollouts of the next step have begun
            steps = run.steps(STEPS)
            assert run.wait() == 0, run.last_words()
        finally:
            run.end()
        for number, step in enumerate(steps, start=1):
            print(
                f"step {number}: rollout/actor probabilities differ by at most "
                f"{step['training/rollout_probs_diff_max']:.1e}, {step['training/rollout_probs_diff_mean']:.1e} on "
                f"average; score {step['critic/score/mean']:.3f}, version {step['gateway/weight_version']}, "
                f"sync {step['gateway/sync_s']:.2f} s"
            )
        furthest = max(step["training/rollout_probs_diff_max"] for step in steps)
        assert furthest < LARGEST_DIFFERENCE
        record_property("fact", f"rollout and actor probabilities within {furthest:.0e}")
        # On-policy, by the bookkeeping of versions: the weights sent at the start are version 1, step 0.
        assert [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps] == [0] * STEPS
        assert [step["gateway/weight_version"] for step in steps] == [2, 3, 4]
        assert served.ask("/weight_info")["weight_version"] == "4"
        left = [(replica["state"], replica["weight_version"]) for replica in served.ask("/status")["replicas"]]
        assert left == [("SERVING", 4)]
        # Every step moved the log-probs of the engines; the weights sent at the start were theirs.
        moved = {
            update["version"]: largest_move(update) for update in served.ask("/v1/weight_updates")["weight_updates"]
        }
        assert moved[1] < LARGEST_DIFFERENCE
        assert all(moved[version] > LARGEST_DIFFERENCE for version in (2, 3, 4)), moved


@pytest.mark.slow
@runs_client(
    "verl main_ppo, batches ahead",
    "verl",
    ran="examples/verl_cpu.sh against `rollout-gateway up`: four batches requested ahead, of two rollouts at a time",
    against="2 x vLLM, CPU",
)
def test_batches_are_made_ahead_and_go_on_through_syncs(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with up(tmp_path, "engine.max_num_seqs=2") as served:
        ahead = ("+trainer.v1.gateway.num_warmup_batches=4", f"trainer.total_training_steps={STEPS}")
        steps = Run("verl_cpu.sh", tmp_path, served.url, *ahead).to_end(steps=STEPS)
        assert served.ask("/weight_info")["weight_version"] == "4"
    assert [step["gateway/weight_version"] for step in steps] == [2, 3, 4]
    # The first version of a trajectory, in verl's steps: later steps train on older weights' rollouts, and know it.
    staleness = [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps]
    assert staleness[0] == 0 < staleness[-1]
    assert steps[0]["training/rollout_probs_diff_max"] < LARGEST_DIFFERENCE
    record_property("fact", f"rollouts up to {staleness[-1]:.0f} versions old")
