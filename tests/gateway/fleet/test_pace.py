"""The pace of an engine, learned from its counters."""

import math
from random import Random

import pytest

from gateway.fleet.pace import Pace
from gateway.fleet.watch.engine_page import EngineWork


def learned(step_s: float, token_s: float, shares: list[float], running: float = 8.0) -> Pace:
    """The pace of an engine at work, which reads prompts for a share of each ten seconds."""
    pace, read, steps = Pace(), 0.0, 0.0
    pace.see(100.0, EngineWork(read, steps, running))
    for number, share in enumerate(shares, 1):
        read, steps = read + 10 * share / token_s, steps + 10 * (1 - share) / step_s
        pace.see(100.0 + 10 * number, EngineWork(read, steps, running))
    return pace


@pytest.mark.parametrize("token_s", [1e-3, 1e-4, 2.5e-5, 1e-6])
@pytest.mark.parametrize("step_s", [0.001, 0.007, 0.05])
@pytest.mark.parametrize("most", [0.1, 0.9])
def test_a_step_is_weighed_against_reading_a_prompt(step_s: float, token_s: float, most: float) -> None:
    draw = Random(1)
    pace = learned(step_s, token_s, [most * draw.random() for _ in range(40)])
    assert pace.step_tokens == pytest.approx(step_s / token_s, rel=0.5)


def test_looks_that_are_all_alike_leave_a_gpus_pace() -> None:
    assert learned(0.007, 1e-6, [0.3] * 20).step_tokens == pytest.approx(250)


@pytest.mark.parametrize(("shares", "running"), [([], 8.0), ([0.0] * 5, 8.0), ([0.3] * 5, 0.0)])
def test_it_is_unknown_before_an_engine_at_work_has_read_a_prompt(shares: list[float], running: float) -> None:
    assert learned(0.007, 1e-5, shares, running).step_tokens == math.inf


def test_the_first_look_after_a_restart_or_a_silence_and_one_too_soon_tell_nothing() -> None:
    pace = Pace()
    for at, read, steps in ((0, 5000, 5000), (10, 10, 10), (10.5, 9000, 20), (900, 20_000, 30)):
        pace.see(at, EngineWork(read, steps, 8))
    assert pace.step_tokens == math.inf
    pace.see(910, EngineWork(21_000, 1030, 8))
    assert pace.step_tokens < math.inf
