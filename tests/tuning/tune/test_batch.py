"""The batch that engines are measured with."""

import pytest

from tuning.plan.workload import Lengths, StepWorkload
from tuning.tune.batch import Ask, drawn

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
