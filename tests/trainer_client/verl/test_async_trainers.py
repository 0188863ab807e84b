"""verl's own asynchronous trainers, as examples/verl_async_cpu.sh has them, against real vLLM replicas on CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.verl_run import LARGEST_DIFFERENCE, Run, fleet, up
from tests.running.client_records import runs_client

pytestmark = [pytest.mark.verl, pytest.mark.slow]

STEPS = 3
# Batches are asked for well ahead, of engines that take two rollouts at a time, so that syncs find some under way.
AHEAD = "trainer.v1.separate_async.num_warmup_batches=4"
ABORTING = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gateway.abort_at_sync=True"


@runs_client(
    "verl separate_async",
    "verl==0.9.1",
    ran="examples/verl_async_cpu.sh against `rollout-gateway up`: batches ahead, rollouts aborted by syncs and resumed",
    against="2 x vLLM, CPU",
)
def test_separate_async_trains_on_batches_that_were_made_ahead(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with up(tmp_path, "engine.max_num_seqs=2") as served:
        run = Run("verl_async_cpu.sh", tmp_path, served.url, f"trainer.total_training_steps={STEPS}", AHEAD, ABORTING)
        steps = run.to_end(steps=STEPS)
        assert served.ask("/weight_info")["weight_version"] == "4"
    assert [step["gateway/weight_version"] for step in steps] == [2, 3, 4]
    # The first version of a trajectory, in verl's steps: from the second step on it trains on older weights' rollouts.
    staleness = [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps]
    assert staleness[0] == 0 < staleness[-1]
    # The first step is on-policy, all of it drawn with the weights that were sent at the start.
    furthest = steps[0]["training/rollout_probs_diff_max"]
    assert furthest < LARGEST_DIFFERENCE
    record_property("fact", f"first step's rollout and actor probabilities within {furthest:.0e}")
    record_property("fact", f"rollouts up to {staleness[-1]:.0f} versions old")


@runs_client(
    "verl one_step_off_policy",
    "verl==0.9.1",
    ran="examples/verl_async_cpu.sh with TRAINER=one_step_off: weights synced after each step",
    against="2 x vLLM, CPU",
)
def test_one_step_off_generates_the_next_batch_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setenv("TRAINER", "one_step_off")
    with fleet(tmp_path) as served:
        run = Run("verl_async_cpu.sh", tmp_path, served.url, f"trainer.total_training_steps={STEPS}")
        steps = run.to_end(steps=STEPS)
        assert served.ask("/weight_info")["weight_version"] == "4"
    assert [step["gateway/weight_version"] for step in steps] == [2, 3, 4]
    record_property("fact", f"{STEPS} steps, {STEPS + 1} versions")


@runs_client(
    "verl fully_async_policy",
    "verl==0.9.1",
    ran="examples/verl_async_cpu.sh with TRAINER=fully_async: rollouts stream, weights synced every two steps",
    against="2 x vLLM, CPU",
)
def test_fully_async_counts_its_parameter_versions_by_the_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setenv("TRAINER", "fully_async")
    with fleet(tmp_path) as served:
        run = Run("verl_async_cpu.sh", tmp_path, served.url)
        steps = run.to_end()
        assert served.ask("/weight_info")["weight_version"] == "5"
    count = "fully_async/count"
    trained = [step for step in steps if "critic/score/mean" in step]
    assert [step[f"{count}/current_param_version"] for step in trained] == [0, 1, 2, 3]
    # From the second on it trains on what older parameters made too, and knows it.
    stale = [step[f"{count}/stale_trajectory_processed"] for step in trained]
    assert stale[0] == 0 < stale[-1]
    record_property("fact", f"{len(trained)} parameter versions after the first, {stale[-1]:.0f} stale trajectories")
