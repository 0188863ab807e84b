"""verl takes the rows of agents' sessions as its own batch."""

import numpy as np
import pytest

verl = pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from trainer_client.sessions.exports import verl_fields
from trainer_client.sessions.trajectories import Trajectory

pytestmark = pytest.mark.verl

ROW = Trajectory(
    session_id="s",
    group="task",
    calls=(0, 1),
    agent=None,
    prompt_ids=np.array([5, 6], np.int32),
    completion_ids=np.array([7, 20, 9], np.int32),
    mask=np.array([1, 0, 1], np.int8),
    logprobs=np.array([-0.5, 0.0, -1.5], np.float32),
    versions=np.array([3, -1, 4], np.int32),
    rewards=np.zeros(3, np.float32),
    reward=1.0,
    finish_reason="stop",
    routed_experts=None,
)


def test_rows_become_a_data_proto() -> None:
    tensors, others = verl_fields([ROW, ROW], prompt_length=3, response_length=4, pad_token_id=0)
    batch = verl.DataProto.from_dict(
        tensors={name: torch.from_numpy(value) for name, value in tensors.items()}, non_tensors=others
    )
    assert len(batch) == 2
    assert batch.batch["response_mask"].tolist() == [[1, 0, 1, 0]] * 2
    assert batch.batch["rm_scores"].sum(-1).tolist() == [1.0, 1.0]
    assert batch.non_tensor_batch["max_global_steps"].tolist() == [4, 4]
