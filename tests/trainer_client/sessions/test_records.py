"""Sessions as they are read: arrays, and refusals of what a client cannot rely on."""

import numpy as np
import pytest

from engines.errors import EngineFailed, RolloutGatewayError
from tests.rigs.session_records import as_bytes, call, events
from trainer_client.results import WeightSpan
from trainer_client.sessions.records import read_session


def test_msgpack_and_lines_of_json_give_the_same_session() -> None:
    first = call(0, logprobs=[-0.5, None])
    records = events(first, call(1, first, (9,), tools=[{"name": "bash"}]))
    for session in (read_session(records), read_session([records[0], *map(as_bytes, records[1:-1]), records[-1]])):
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
        read_session(events(schema_version=2))


def test_media_are_bytes() -> None:
    told = {"id": "a1", "media_type": "image/png", "data": "iVBO"}
    first = call(0, media=[told])
    session = read_session(events(first, call(1, first, (9,), media=[{"id": "a1"}])))
    assert [call.media[0].data for call in session.calls] == [b"\x89PN"] * 2


def test_fields_of_a_later_gateway_are_ignored() -> None:
    assert read_session(events(call(0, novel=1), novel={})).calls[0].token_ids.tolist() == [7, 8]


def test_records_that_lack_a_call_or_their_end_are_refused() -> None:
    whole = events(call(0), call(1))
    with pytest.raises(EngineFailed, match="1 calls came"):
        read_session([whole[0], whole[1], whole[3]])
    with pytest.raises(EngineFailed, match="token_ids"):
        read_session([whole[0], {**whole[1], "token_ids": None}, {"type": "end", "calls": 1}])
