"""verl takes the rows of agents' sessions as its own batch."""

import pytest

verl = pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from tests.rigs.session_records import call, events
from trainer_client.sessions.exports import verl_fields
from trainer_client.sessions.records import read_session
from trainer_client.sessions.trajectories import trajectories_of

pytestmark = pytest.mark.verl


def test_rows_become_a_data_proto() -> None:
    first = call(0, ids=(7,))
    [row] = trajectories_of(read_session(events(first, call(1, first, (20,), (9,)))))
    tensors, others = verl_fields([row, row], prompt_length=3, response_length=4, pad_token_id=0)
    batch = verl.DataProto.from_dict(
        tensors={name: torch.from_numpy(value) for name, value in tensors.items()}, non_tensors=others
    )
    assert len(batch) == 2
    assert batch.batch["response_mask"].tolist() == [[1, 0, 1, 0]] * 2
    assert batch.batch["rm_scores"].sum(-1).tolist() == [1.0, 1.0]
    assert batch.non_tensor_batch["max_global_steps"].tolist() == [3, 3]
