"""Trajectories in the fields of TRL, which is not imported: lists alone."""

from collections.abc import Sequence
from typing import Any

from trainer_client.sessions.trajectories import Trajectory


def trl_fields(rows: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Return what TRL's `rollout_func` returns. Its `session_reward` reaches reward functions as a column.

    TRL needs as many rows as it gave prompts: one of each session, such as the first of `trajectories_of`.
    """
    return {
        "prompt_ids": [row.prompt_ids.tolist() for row in rows],
        "completion_ids": [row.completion_ids.tolist() for row in rows],
        "logprobs": [row.logprobs.tolist() for row in rows],
        "env_mask": [row.mask.tolist() for row in rows],
        "session_reward": [row.reward for row in rows],
    }
