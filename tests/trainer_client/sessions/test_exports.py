"""Trajectories in trainers' fields."""

from dataclasses import replace

import numpy as np
import pytest

from engines.errors import InvalidRequest
from tests.rigs.session_records import call, events
from trainer_client.sessions.exports import trl_fields, verl_fields
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


def test_verl_gets_padded_arrays_with_rewards_at_their_tokens(row: Trajectory) -> None:
    tensors, others = verl_fields([row], prompt_length=3, response_length=5, pad_token_id=0)
    assert {name: value.tolist() for name, value in tensors.items()} == {
        "prompts": [[0, 5, 6]],
        "responses": [[7, 8, 20, 9, 0]],
        "input_ids": [[0, 5, 6, 7, 8, 20, 9, 0]],
        "attention_mask": [[0, 1, 1, 1, 1, 1, 1, 0]],
        "position_ids": [[0, 0, 1, 2, 3, 4, 5, 5]],
        "response_mask": [[1, 1, 0, 1, 0]],
        "rollout_log_probs": [[-0.5, -0.75, 0.0, -1.5, 0.0]],
        "rm_scores": [[0.0, 0.25, 0.0, 1.0, 0.0]],
    }
    assert {name: value.tolist() for name, value in others.items()} == {
        "uid": ["s"], "min_global_steps": [3], "max_global_steps": [3],
    }  # fmt: skip


def test_sessions_of_a_group_have_its_uid_for_verl() -> None:
    head, *calls = events(call(0))
    sessions = [read_session([head | {"id": id, "metadata": {"group": "sort-3"}}, *calls]) for id in ("a", "b")]
    rows = [row for session in sessions for row in trajectories_of(session)]
    _, others = verl_fields(rows, prompt_length=2, response_length=2, pad_token_id=0)
    assert others["uid"].tolist() == ["sort-3", "sort-3"]


def test_a_long_response_is_cut_for_verl_and_a_long_prompt_refused(row: Trajectory) -> None:
    tensors, _ = verl_fields([row], prompt_length=2, response_length=2, pad_token_id=0)
    assert tensors["rm_scores"].tolist() == [[0.0, 1.25]]
    with pytest.raises(InvalidRequest, match="prompt_length = 1: a prompt of session 's' has 2 tokens"):
        verl_fields([row], prompt_length=1, response_length=2, pad_token_id=0)


def test_no_rows_are_empty_arrays_for_verl() -> None:
    tensors, others = verl_fields([], prompt_length=2, response_length=2, pad_token_id=0)
    assert tensors["input_ids"].shape == (0, 4)
    assert others["min_global_steps"].shape == (0,)


def test_routed_experts_are_told_as_verl_has_them(row: Trajectory) -> None:
    """Of 5 of 6 ids: none has come of the last one, whose successor was not asked for."""
    experts = np.arange(1, 11, dtype=np.uint8).reshape(5, 1, 2)
    row = replace(row, routed_experts=experts)
    tensors, _ = verl_fields([row], prompt_length=3, response_length=3, pad_token_id=0)
    assert tensors["routed_experts"][0, :, 0].tolist() == [[0, 0], [1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    tensors, _ = verl_fields([row], prompt_length=2, response_length=5, pad_token_id=0)
    assert tensors["routed_experts"][0, 4:, 0].tolist() == [[9, 10], [0, 0], [0, 0]]
    both, _ = verl_fields([row, replace(row, routed_experts=None)], prompt_length=2, response_length=5, pad_token_id=0)
    assert "routed_experts" not in both
