"""The study of reply forms reads the same samples in each form."""

import sys

import msgspec
import orjson
import pytest

from gateway.http.replies.record_stream import as_lines
from loadtests.studies import reply_forms


def test_all_forms_end_as_the_same_arrays() -> None:
    events = [reply_forms._event(index, 16) for index in range(8)]
    packed = msgspec.msgpack.encode(events[0])
    [line] = as_lines([packed]).splitlines()
    of_reply = reply_forms._read_reply(orjson.dumps(reply_forms._reply(events))).completions[0]  # type: ignore[attr-defined]
    for read in (reply_forms._read_packed(packed), reply_forms._read_line(line)):
        assert read.token_ids.tolist() == of_reply.token_ids.tolist()  # type: ignore[attr-defined]
        assert read.logprobs.tolist() == of_reply.logprobs.tolist()  # type: ignore[attr-defined]
        assert read.spans == of_reply.spans  # type: ignore[attr-defined]


def test_it_prints_a_row_for_each_form(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["reply_forms", "--tokens", "16", "--samples", "8"])
    reply_forms.main()
    assert capsys.readouterr().out.count("\n|") == 4
