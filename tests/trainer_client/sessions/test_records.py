"""Sessions as they are read: arrays, and refusals of what a client cannot rely on."""

import math

import numpy as np
import pytest

from engines.errors import EngineFailed, RolloutGatewayError
from tests.rigs.session_records import call, events, session_of
from trainer_client.results import WeightSpan


def test_ids_and_log_probs_are_arrays_and_calls_know_what_is_before_them() -> None:
    first = call(0, logprobs=[-0.5, math.nan])
    session = session_of(events(first, call(1, first, (9,), tools=[{"name": "bash"}])))
    one, two = session.calls
    assert (one.token_ids.dtype, one.token_ids.tolist()) == (np.dtype(np.int32), [7, 8])
    assert one.logprobs is not None
    assert one.logprobs.dtype == np.float32
    assert one.logprobs[0] == -0.5
    assert np.isnan(one.logprobs[1])
    assert (two.parent, two.prompt_tokens, two.prompt_token_ids.tolist()) == (0, 5, [9])
    assert two.spans == (WeightSpan(3, 0, 2),)
    assert (session.id, session.state, session.reward, session.oldest_version) == ("s", "frozen", 1.0, 3)
    assert [at.index for at in session.path(1)] == [0, 1]


def test_a_newer_schema_is_refused_with_the_remedy() -> None:
    with pytest.raises(RolloutGatewayError, match=r"schema_version 2.*up to 1: install"):
        session_of(events(schema_version=2))


def test_a_later_call_has_the_media_of_an_earlier_one() -> None:
    first = call(0, media=[{"id": "a1", "media_type": "image/png", "data": b"\x89PN"}])
    session = session_of(events(first, call(1, first, (9,), media=[{"id": "a1"}])))
    assert [call.media[0].data for call in session.calls] == [b"\x89PN"] * 2


def test_fields_of_a_later_gateway_are_ignored() -> None:
    assert session_of(events(call(0, novel=1), novel={})).calls[0].token_ids.tolist() == [7, 8]


def test_records_that_lack_a_call_or_their_end_are_refused() -> None:
    whole = events(call(0), call(1))
    with pytest.raises(EngineFailed, match="1 calls came"):
        session_of([whole[0], whole[1], whole[3]])
    with pytest.raises(EngineFailed, match="token_ids"):
        session_of([whole[0], {**whole[1], "token_ids": None}, {"type": "end", "calls": 1}])
