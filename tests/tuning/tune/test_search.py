"""The search, on engines whose speeds are known, with a clock of its own."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from engines.config import EngineConfig
from engines.errors import ConfigError, DeadlineExceeded, EngineStartFailed
from engines.types import EngineKind
from tuning.tune.bench import Running
from tuning.tune.levers import Setting, grid
from tuning.tune.search import Outcome, Tuner, judged

START = EngineConfig(kind=EngineKind.SIM, max_num_seqs=8)
LEVERS = ("max_num_seqs=16,32,64", "max_num_batched_tokens=1024,8192")
START_S = 60.0
Speed = Callable[[EngineConfig], float]


def speed(engine: EngineConfig) -> float:
    """The best has 32 sequences and small steps; 64 sequences with large ones do not start."""
    seqs, tokens = engine.max_num_seqs, engine.max_num_batched_tokens or 2048
    if seqs == 64 and tokens == 8192:
        return 0.0
    return {8: 100.0, 16: 120.0, 32: 140.0, 64: 130.0}[seqs] * (1.2 if tokens == 1024 else 1.0)


class VirtualBench:
    """`lies` is what the search sees of a changed engine, beside what the pairs see."""

    tokens = 6000

    def __init__(self, speed: Speed = speed, lies: float = 1.0) -> None:
        self.now = 0.0
        self.starts: list[int] = []
        self._speed = speed
        self._lies = lies

    def clock(self) -> float:
        return self.now

    @asynccontextmanager
    async def serving(self, engine: EngineConfig, start_s: float) -> AsyncIterator[Running]:
        self.now += START_S
        self.starts.append(engine.max_num_seqs)
        if not (speed := self._speed(engine)):
            raise EngineStartFailed("out of memory", replica_id="tune-0")
        yield _Running(self, speed, self._lies if engine != START else 1.0)


class _Running:
    def __init__(self, bench: VirtualBench, speed: float, lies: float) -> None:
        self._bench, self._speed, self._lies = bench, speed, lies

    async def run(self, number: int, timeout_s: float) -> float:
        seconds = self._bench.tokens / self._speed / (self._lies if number < 1000 else 1.0)
        self._bench.now += min(seconds, timeout_s)
        if seconds > timeout_s:
            raise DeadlineExceeded("cut off")
        return seconds


async def tune(bench: VirtualBench, budget_s: float = 1e6, levers: Sequence[str] = LEVERS) -> Outcome:
    settings = grid(START, levers, 64, 0)
    tuner = Tuner(START, settings, bench, budget_s=budget_s, pairs=3, report=lambda _: None, clock=bench.clock)
    return await tuner.run()


def failures(outcome: Outcome) -> list[tuple[Setting, str]]:
    return [(record.setting, record.failure) for record in outcome.records if record.failure]


async def test_the_whole_grid_is_measured_and_the_fastest_meets_the_start_in_pairs() -> None:
    outcome = await tune(VirtualBench())
    assert outcome.best == {"max_num_seqs": 32, "max_num_batched_tokens": 1024}
    assert [start for start, _ in outcome.pairs] == [100.0] * 3
    assert "1.680 times the start's tokens/s in the median" in outcome.reason
    assert len(outcome.records) == 4 * 3
    assert outcome.untried == 0


async def test_a_start_that_cannot_be_measured_ends_the_run() -> None:
    with pytest.raises(ConfigError, match=r"the start cannot be measured: .*out of memory"):
        await tune(VirtualBench(lambda engine: 0.0))


@pytest.mark.parametrize("budget_s", [1000.0, 1500.0, 2000.0])
async def test_a_budget_that_runs_out_leaves_the_end_of_the_grid_and_time_for_the_pairs(budget_s: float) -> None:
    bench = VirtualBench()
    outcome = await tune(bench, budget_s)
    assert bench.now <= budget_s
    assert outcome.untried == 12 - len(outcome.records) > 0
    assert outcome.pairs
    assert speed(START.model_copy(update=dict(outcome.best))) >= speed(START)


async def test_what_was_only_luck_is_not_kept() -> None:
    outcome = await tune(VirtualBench(lambda engine: 100 - engine.max_num_seqs, lies=1.5), levers=LEVERS[:1])
    assert outcome.favoured
    assert outcome.best == {}
    assert outcome.reason.startswith("the start is kept: the favoured setting reached 0.")


async def test_a_start_that_is_far_behind_needs_no_pairs() -> None:
    outcome = await tune(VirtualBench(lambda engine: float(engine.max_num_seqs)), levers=LEVERS[:1])
    assert (outcome.best, outcome.pairs) == ({"max_num_seqs": 64}, [])
    assert outcome.reason == "8 times the start's tokens/s, too far ahead to need pairs"


async def test_a_start_that_is_best_is_kept_without_pairs_and_slower_settings_are_cut_off() -> None:
    outcome = await tune(VirtualBench(lambda engine: 800 / engine.max_num_seqs), levers=LEVERS[:1])
    assert (outcome.best, outcome.pairs) == ({}, [])
    assert [failure for _, failure in failures(outcome)] == ["cut off"] * 3


@pytest.mark.parametrize(
    ("ratios", "is_better", "reason"),
    [
        ([1.1, 1.2, 1.3], True, "1.200 times"),
        ([0.96, 1.43, 0.75], False, "noise is larger than any gain: 0.750 to 1.430 times"),
        ([1.3, 1.2, 0.99], False, "noise is larger than any gain"),
        ([1.001, 1.002, 1.003], False, "the start is kept"),
        ([0.9, 0.8], False, "the start is kept: the favoured setting reached 0.800 to 0.900"),
        ([], False, "the budget was over before the first final pair"),
    ],
)
def test_a_gain_is_one_that_every_pair_has(ratios: list[float], is_better: bool, reason: str) -> None:
    found, text = judged(ratios)
    assert found is is_better
    assert reason in text
