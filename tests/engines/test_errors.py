"""Errors of one process in another."""

import pickle

import pytest

from engines.errors import (
    EngineFailed,
    EngineRefused,
    GatewayUnreachable,
    InvalidRequest,
    NotAllowed,
    RolloutGatewayError,
    WeightUpdateFailed,
)


@pytest.mark.parametrize(
    "error",
    [
        EngineFailed("the disk is full", replica_id="engine-1"),
        EngineRefused("no", status=404, body={"error": "no"}, replica_id="engine-1"),
        GatewayUnreachable("gone", arrived=False),
        InvalidRequest("n = 0", param="n"),
        NotAllowed("no admin key", known=True),
        WeightUpdateFailed("replica engine-1: gone", replica_id="engine-1"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_reaches_another_process_whole(error: RolloutGatewayError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert (str(there), vars(there)) == (str(error), vars(error))
