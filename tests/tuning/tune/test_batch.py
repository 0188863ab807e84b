"""The batch that engines are measured with."""

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


@pytest.mark.parametrize("line", ["{", "[1]", '{"prompts": [{"blocks": []}], "status": 200}'])
def test_a_line_that_is_of_no_trace_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "batch.jsonl"
    file.write_text('{"trace": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"batch\.jsonl:2: not a line of a trace"):
        recorded(file)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(ConfigError, match="it holds no request that was answered"):
        recorded(tmp_path / "none.jsonl")
