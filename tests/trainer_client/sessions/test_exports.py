"""Trajectories in trainers' fields."""

import pytest

from tests.rigs.session_records import call, events
from trainer_client.sessions.exports import trl_fields
from trainer_client.sessions.records import read_session
from trainer_client.sessions.trajectories import Trajectory, trajectories_of


@pytest.fixture
def row() -> Trajectory:
    """[5, 6] -> 7 8, a tool's 20, -> 9."""
    first = call(0, reward=0.25)
    (made,) = trajectories_of(read_session(events(first, call(1, first, (20,), (9,)))))
    return made


def test_trl_trains_on_sampled_tokens_alone(row: Trajectory) -> None:
    assert trl_fields([row]) == {
        "prompt_ids": [[5, 6]],
        "completion_ids": [[7, 8, 20, 9]],
        "logprobs": [[-0.5, -0.75, 0.0, -1.5]],
        "env_mask": [[1, 1, 0, 1]],
        "session_reward": [1.0],
    }
