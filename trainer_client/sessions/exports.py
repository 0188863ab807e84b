"""Trajectories in the fields of trainers. None of these is imported: arrays and lists alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.errors import InvalidRequest
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


def verl_fields(
    rows: Sequence[Trajectory], *, prompt_length: int, response_length: int, pad_token_id: int
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Return the tensors and the non-tensors of verl's DataProto, as `DataProto.from_dict` takes them after
    `torch.from_numpy`.

    Prompts are padded on the left and responses on the right. A response that is longer is cut, which leaves its begin
    exact. Raise `InvalidRequest` for a longer prompt: its begin cannot be left out. The session's reward is on the last
    token that is trained, and rewards of calls on theirs. `uid` is the group, whose sessions verl's advantages compare.
    `routed_experts` are there where all rows have them, zeros for ids without.
    """
    width, shape = prompt_length + response_length, (len(rows), response_length)
    input_ids = np.full((len(rows), width), pad_token_id, np.int64)
    attention_mask = np.zeros((len(rows), width), np.int64)
    response_mask, log_probs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    scores = np.zeros(shape, np.float32)
    for place, row in enumerate(rows):
        asked, made = len(row.prompt_ids), min(len(row.completion_ids), response_length)
        if asked > prompt_length:
            raise InvalidRequest(
                f"prompt_length = {prompt_length}: a prompt of session {row.session_id!r} has {asked} tokens; raise it "
                "(data.max_prompt_length), or leave this trajectory out",
                param="prompt_length",
            )
        begin, end = prompt_length - asked, prompt_length + made
        input_ids[place, begin:prompt_length] = row.prompt_ids
        input_ids[place, prompt_length:end] = row.completion_ids[:made]
        attention_mask[place, begin:end] = 1
        response_mask[place, :made], log_probs[place, :made] = row.mask[:made], row.logprobs[:made]
        scores[place, :made] = row.rewards[:made]
        if row.reward is not None and (trained := np.flatnonzero(row.mask[:made])).size:
            scores[place, trained[-1]] += row.reward
    tensors = {
        "prompts": input_ids[:, :prompt_length],
        "responses": input_ids[:, prompt_length:],
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": np.maximum(attention_mask.cumsum(axis=1) - 1, 0),
        "response_mask": response_mask,
        "rollout_log_probs": log_probs,
        "rm_scores": scores,
    }
    experts = [row.routed_experts for row in rows if row.routed_experts is not None]
    if experts and len(experts) == len(rows):
        tensors["routed_experts"] = routed = np.zeros((*input_ids.shape, *experts[0].shape[1:]), experts[0].dtype)
        for place, (row, told) in enumerate(zip(rows, experts, strict=True)):
            begin = prompt_length - len(row.prompt_ids)
            routed[place, begin : begin + len(told)] = told[: width - begin]
    steps = np.array([row.version_range for row in rows], np.int64).reshape(-1, 2)
    uids = np.array([row.group for row in rows], object)
    return tensors, {"uid": uids, "min_global_steps": steps[:, 0], "max_global_steps": steps[:, 1]}
