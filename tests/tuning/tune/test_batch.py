"""The batch that engines are measured with."""

import json
from pathlib import Path
from typing import Any

import pytest

from engines.errors import ConfigError
from gateway.config.schema import TraceConfig
from gateway.http.trace import Arrival, Trace
from tuning.plan.workload import Lengths, StepWorkload
from tuning.tune.batch import Ask, drawn, recorded

WORK = StepWorkload(prompts=100, samples=4, prompt=Lengths(64, 64), response=Lengths(100, 400))


def test_a_drawn_batch_has_the_lengths_that_were_asked_for() -> None:
    batch = drawn(WORK)
    assert len(batch.asks) == 100
    assert batch.completions == 400
    assert batch.tokens == pytest.approx(400 * 100, rel=0.02)
    assert batch.longest == 64 + 400
    assert batch == drawn(WORK)


def test_every_run_has_prompts_of_its_own_and_the_same_for_every_engine() -> None:
    ask = Ask(prompt_tokens=32, max_tokens=8, samples=2)
    assert ask.body("run 0 1") == ask.body("run 0 1")
    assert ask.body("run 0 1")["prompt"] != ask.body("run 1 1")["prompt"]


def test_recorded_ids_are_salted_for_every_run() -> None:
    ask = Ask(prompt_tokens=3, max_tokens=8, samples=1, prompt=(7, 8, 9))
    assert ask.body("a")["prompt"] == ask.body("b")["prompt"] == [7, 8, 9]
    assert ask.body("a")["cache_salt"] != ask.body("b")["cache_salt"]


def test_a_recorded_batch_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "batch.jsonl"
    lines = [{"prompt": [5, 6], "max_tokens": 9, "n": 2}, {"prompt_tokens": 40, "max_tokens": 3, "at_s": 0.5}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert recorded(file).asks == (Ask(2, 9, 2, (5, 6)), Ask(40, 3, 1))


def test_a_trace_that_a_gateway_wrote_is_read_prompt_by_prompt(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    trace = Trace(TraceConfig(file=str(file)))
    told: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
        ({"prompt": [[5] * 40, [6] * 20], "n": 2, "max_tokens": 100}, 200, {"completion_tokens": 41}),
        ({"prompt": [[7] * 9]}, 503, {}),
        ({"prompt": "eight characters and more", "max_tokens": 50}, 200, {"completion_tokens": 10}),
    ]
    for body, status, usage in told:
        trace.ended(Arrival("/v1/completions", body, "", 1.0, 1.0), status, usage)
    trace.close()
    assert recorded(file).asks == (Ask(40, 11, 2), Ask(20, 11, 2), Ask(6, 10, 1))
    assert recorded(file, 1).asks == (Ask(40, 11, 2),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"batch\.jsonl:2: no JSON"),
        ("[1]", r"batch\.jsonl:2: an object is expected"),
        ('{"prompt": "hello", "max_tokens": 3}', r":2: prompt: a list of token ids is expected"),
        ('{"prompts": [{"blocks": []}], "status": 200}', r":2: not a line of a trace: KeyError"),
        ('{"prompt_tokens": 4}', r":2: max_tokens = None: a whole number of at least 1 is expected"),
        ('{"prompt_tokens": 4, "max_tokens": 1, "n": 0}', r":2: n = 0"),
    ],
)
def test_a_line_that_cannot_be_is_refused_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "batch.jsonl"
    file.write_text('{"prompt_tokens": 4, "max_tokens": 4}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        recorded(file)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(ConfigError, match="it holds no request that was answered"):
        recorded(tmp_path / "none.jsonl")
