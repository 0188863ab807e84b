"""When tokens came, of events whose times are known."""

import orjson
import pytest

from loadtests.report.timeline import Timeline, tail_ratio


def event(index: int, tokens: int, finish: str | None = None) -> bytes:
    choice = {"index": index, "token_ids": [9] * tokens, "finish_reason": finish}
    return b"data: " + orjson.dumps({"choices": [choice]}) + b"\n"


def timeline(*events: tuple[float, bytes]) -> Timeline:
    read = Timeline()
    for at, line in events:
        read.feed(line, at)
    return read


def test_first_token_and_time_per_token() -> None:
    read = timeline(
        (10.2, event(0, 1)),
        (10.2, b"\n"),
        (10.5, event(0, 4)),
        (11.0, event(0, 5, "length")),
        (11.1, b"data: [DONE]\n"),
    )
    times = read.completions[0]
    assert times.first == 10.2
    assert times.tpot_s == pytest.approx((11.0 - 10.2) / 9)
    assert times.longest_gap_s == pytest.approx(0.5)
    assert (times.ended, read.tokens, read.ended, read.is_whole) == (11.0, 10, 1, True)


def test_the_tail_of_a_batch() -> None:
    part = timeline((1.0, event(0, 1, "length")), (1.0, event(1, 1, "length")), (4.0, event(2, 1, "length")))
    assert tail_ratio([part], began=0.0) == pytest.approx(4 / 2)
    even = timeline((2.0, event(0, 1, "length")), (2.0, event(1, 1, "length")))
    assert tail_ratio([even], began=0.0) == 1.0


def test_an_error_within_a_stream_is_raised() -> None:
    with pytest.raises(ValueError, match="engine-1 is lost"):
        timeline((1.0, b'data: {"error": {"message": "engine-1 is lost"}}\n'))
    with pytest.raises(ValueError, match="no event"):
        timeline((1.0, b"<html>\n"))
