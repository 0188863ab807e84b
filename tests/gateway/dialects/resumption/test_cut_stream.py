"""Which samples of a stream are to go on once it is over."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engines.errors import EngineFailed
from gateway.dialects.resumption.cut_stream import CutStream
from gateway.fleet.flight import Flight
from gateway.fleet.replica import Replica

Json = dict[str, Any]


def replica(*, cuts_off: bool) -> Replica:
    return cast(Replica, SimpleNamespace(replica_id="engine-0", weight_version=1, cuts_off=cuts_off))


def told(index: int, finish_reason: str | None) -> Json:
    return {"index": index, "token_ids": [7, 8], "prompt_token_ids": [5, 6], "finish_reason": finish_reason}


def stream(*, resumes: bool = True) -> CutStream:
    return CutStream(range(2), None, inexact=() if resumes else None)


def test_a_sample_that_was_never_begun_is_made_also_where_the_others_had_ended() -> None:
    seen = stream()
    seen.see(told(0, "stop"), replica(cuts_off=True), Flight(1))
    assert seen.cut_off() == {1: {"prompt_token_ids": [5, 6], "token_ids": []}}


def test_one_that_was_never_begun_and_cannot_go_on_is_an_error_and_not_left_out() -> None:
    seen = stream(resumes=False)
    seen.see(told(0, "stop"), replica(cuts_off=True), Flight(1))
    with pytest.raises(EngineFailed, match="was cut off and cannot continue"):
        seen.cut_off()


def test_where_none_can_go_on_one_that_was_never_begun_is_an_error_and_not_left_out() -> None:
    seen = stream()
    seen.see(told(0, "abort"), replica(cuts_off=True), Flight(1))
    assert seen.cut_off().keys() == {0, 1}
    with pytest.raises(EngineFailed, match="was cut off and cannot continue"):
        seen.ends()


def test_samples_that_cannot_go_on_end_as_they_were_cut_off() -> None:
    seen = stream()
    seen.see(told(0, "abort"), replica(cuts_off=True), Flight(1))
    seen.see(told(1, "stop"), replica(cuts_off=True), Flight(1))
    assert [(end["index"], end["finish_reason"]) for end in seen.ends()] == [(0, "abort")]
