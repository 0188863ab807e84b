"""Traces of a gateway as workloads."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ConfigError
from gateway.config.schema import TraceConfig
from gateway.http.trace import Arrival, Trace
from tuning.simulate.workloads.recorded import Recorded
from tuning.simulate.workloads.workload import Ask


def traced(file: Path, *requests: tuple[float, str, dict[str, Any], int]) -> list[list[Ask]]:
    """Return the chains of a trace that the gateway itself has written: (at, session, body, completion tokens)."""
    trace, now = Trace(TraceConfig(file=str(file))), time.time()
    for at, session, body, tokens in requests:
        arrival = Arrival("/v1/completions", body, session, now + at, time.monotonic())
        trace.ended(arrival, 200, {"prompt_tokens": None, "completion_tokens": tokens})
    trace.close()
    return [list(chain) for chain in Recorded.read(file).chains]


def test_requests_come_when_they_came_with_their_lengths(tmp_path: Path) -> None:
    body = {"prompt": [[7] * 40, [8] * 64], "n": 4, "max_tokens": 90}
    first, second, later = traced(
        tmp_path / "trace", (0.0, "", body, 8 * 50), (2.5, "", {"prompt": [7] * 40, "max_tokens": 90}, 10)
    )
    assert [chain[0].after_s for chain in (first, second, later)] == [0.0, 0.0, pytest.approx(2.5, abs=1e-3)]
    assert [(chain[0].prompt, chain[0].lengths) for chain in (first, second)] == [(40, (50,) * 4), (64, (50,) * 4)]
    assert first[0].limit == 90
    assert first[0].request == second[0].request != later[0].request
    assert first[0].prefix == later[0].prefix != second[0].prefix


def test_turns_of_a_session_follow_each_other_and_know_what_was_said(tmp_path: Path) -> None:
    said = [7] * 64
    other = [9] * 96
    [chain] = traced(
        tmp_path / "trace",
        (0.0, "one", {"prompt": said}, 20),
        (3.0, "one", {"prompt": [*said, *[8] * 60]}, 30),
        (7.0, "one", {"prompt": other}, 5),
    )
    assert [ask.known for ask in chain] == [0, 84, 0]
    assert chain[0].prefix == chain[1].prefix != chain[2].prefix
    assert [ask.after_s for ask in chain] == pytest.approx([0.0, 3.0, 4.0], abs=0.05)
    assert len({ask.session for ask in chain}) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r":1: not a line of a trace"),
        (json.dumps({"trace": 1, "began": 0.0}) + "\n{}", r":2: not a line of a trace: KeyError\('status'\)"),
        (json.dumps({"trace": 1, "began": 0.0}), "it holds no request that was answered"),
        ("{}", r":1: .*begins a trace is missing"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(ConfigError, match=message):
        Recorded.read(tmp_path / "file")
