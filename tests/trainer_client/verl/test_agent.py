"""verl trains on sessions of an agent, as examples/verl_agent_cpu.sh has it: two real vLLM replicas, many steps."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.verl_run import Run, fleet
from tests.running.client_records import runs_client

pytestmark = [pytest.mark.verl, pytest.mark.slow]

STEPS = 24
RISE, CLOSE = 0.15, 1e-6


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@runs_client(
    "verl main_ppo, agent",
    "verl",
    ran="examples/verl_agent_cpu.sh: GRPO on sessions of an agent with a tool",
    against="2 x vLLM, CPU",
)
def test_the_reward_rises_by_sessions_of_an_agent(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with fleet(tmp_path) as served:
        run = Run("verl_agent_cpu.sh", tmp_path, served.url, f"trainer.total_training_steps={STEPS}")
        try:
            steps = run.steps(STEPS)
            assert run.wait() == 0, run.last_words()
        finally:
            run.end()
        assert served.ask("/v1/sessions")["sessions"] == []
    rewards = [step["critic/score/mean"] for step in steps]
    risen = mean(rewards[-8:]) - mean(rewards[:4])
    ratios = [step["rollout_corr/rollout_is_mean"] for step in steps]
    print("rewards", [round(one, 3) for one in rewards])
    print("importance ratios", ratios)
    assert risen > RISE
    assert all(abs(ratio - 1) <= CLOSE for ratio in ratios)
    # On-policy: the steps of the recorded weight versions are the trainer's.
    assert [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps] == [0] * STEPS
    # The tool has spoken between two turns, and is not trained.
    assert [step["training/num_turns/max"] for step in steps] == [4] * STEPS
    record_property("fact", f"reward {risen:+.2f} over {STEPS} steps")
