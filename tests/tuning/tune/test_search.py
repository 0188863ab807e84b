"""The search, on simulated engines in virtual time, so that every optimum is known by trying all settings."""

import asyncio
import dataclasses
import itertools
import random
import re
from collections.abc import AsyncGenerator, Sequence
from functools import cache
from pathlib import Path

import pytest

from engines.config import EngineConfig, SimConfig
from engines.errors import ConfigError, EngineFailed
from engines.types import EngineKind
from tests.rigs.virtual_sim import batch_s
from tuning.tune.bench import Measured
from tuning.tune.journal import Journal
from tuning.tune.levers import Lever, Setting
from tuning.tune.search import Outcome, Tuner

SIM = SimConfig(
    decode_step_s=0.004, decode_step_per_seq_s=0.00005, eager_step_s=0.03, prefill_step_s=0.02, kv_tokens=6000,
    kv_tokens_per_batched_token=1,
)  # fmt: skip
START = EngineConfig(
    kind=EngineKind.SIM, max_num_seqs=8, max_num_batched_tokens=128, max_cudagraph_capture_size=16, sim=SIM
)
LEVERS = (
    Lever("max_num_seqs", (8, 4, 16, 32, 64)),
    Lever("max_num_batched_tokens", (128, 512, 1024, 2048, 4096, 8192)),
    Lever("max_cudagraph_capture_size", (16, 32, 64)),
)
# Of which the better value is faster by 13 %.
SMALL = (Lever("max_num_batched_tokens", (128, 512)),)
START_S = 60.0
TOKENS = 32 * 2 * 64


@cache
def speed_of(max_num_seqs: int, batched: int, graph_seqs: int) -> float:
    """Tokens/s of 32 prompts x 2 samples; 0 where the memory does not do for a cache."""
    kv_tokens = SIM.kv_tokens - round(SIM.kv_tokens_per_batched_token * batched)
    if kv_tokens < 200:
        return 0.0
    sim = SIM.model_copy(update={"kv_tokens": kv_tokens})
    limits = {"max_num_batched_tokens": batched, "graph_seqs": graph_seqs}
    return TOKENS / batch_s(
        sim, prompts=32, samples=2, prompt_tokens=64, tokens=64, max_num_seqs=max_num_seqs, **limits
    )


def speed(engine: EngineConfig) -> float:
    assert engine.max_num_batched_tokens
    assert engine.max_cudagraph_capture_size
    return speed_of(engine.max_num_seqs, engine.max_num_batched_tokens, engine.max_cudagraph_capture_size)


def all_speeds() -> dict[Setting, float]:
    names = [lever.name for lever in LEVERS]
    settings = (
        Setting(tuple(zip(names, values, strict=True))) for values in itertools.product(*(one.values for one in LEVERS))
    )
    return {setting: speed(setting.applied_to(START)) for setting in settings}


class VirtualBench:
    """Engines that take no time but that of a clock of their own. `noise` is the spread of their runs."""

    def __init__(self, noise: float = 0.0, lies: float = 1.0) -> None:
        self.now = 0.0
        self.starts = 0
        self._noise = noise
        self._lies = lies
        self._draw = random.Random(0)

    def clock(self) -> float:
        return self.now

    def side_by_side(self, engine: EngineConfig) -> int:
        return 1

    def all_fit(self, engines: Sequence[EngineConfig]) -> bool:
        return True

    async def measure(self, engine: EngineConfig, runs: Sequence[int], start_s: float, run_s: float) -> Measured:
        self.now += START_S
        self.starts += 1
        if not speed(engine):
            return Measured(failure="out of memory")
        seconds = [TOKENS / speed(engine) for _ in runs]
        if max(seconds) > run_s:
            self.now += run_s
            return Measured(failure="cut off", cut_off=True)
        self.now += sum(seconds)
        better = self._lies if engine != START else 1.0
        speeds = tuple(TOKENS / one * better * self._draw.gauss(1, self._noise) for one in seconds)
        return Measured(speeds=speeds, start_s=START_S, run_s=max(seconds))

    async def rounds(
        self, engines: Sequence[EngineConfig], runs: Sequence[int], start_s: float, run_s: float
    ) -> AsyncGenerator[tuple[float, ...]]:
        self.now += len(engines) * START_S
        for _ in runs:
            await asyncio.sleep(0)
            self.now += sum(TOKENS / speed(engine) for engine in engines)
            yield tuple(map(speed, engines))


async def tune(
    folder: Path,
    bench: VirtualBench,
    budget_s: float = 1e6,
    levers: Sequence[Lever] = LEVERS,
    expected: Setting | None = None,
    against: EngineConfig | None = None,
) -> Outcome:
    journal = Journal(folder / "journal.jsonl", {"engine": "sim"})
    tuner = Tuner(
        START, levers, bench, journal, budget_s=budget_s, pairs=3, report=lambda _: None, clock=bench.clock,
        expected=expected, against=against,
    )  # fmt: skip
    return await tuner.run()


async def test_it_finds_the_known_optimum_without_trying_every_setting(tmp_path: Path) -> None:
    speeds = all_speeds()
    outcome = await tune(tmp_path, VirtualBench())
    assert speeds[outcome.best] > 0.99 * max(speeds.values())
    assert max(speeds.values()) > 3 * speeds[outcome.start]
    assert len(outcome.records) < len(speeds) / 2


async def test_it_finds_the_optimum_through_noise(tmp_path: Path) -> None:
    speeds = all_speeds()
    outcome = await tune(tmp_path, VirtualBench(noise=0.03))
    assert speeds[outcome.best] > 0.97 * max(speeds.values())


@pytest.mark.parametrize("budget_s", [450.0, 700.0, 1500.0, 4000.0])
async def test_it_ends_within_its_budget_and_never_below_the_start(tmp_path: Path, budget_s: float) -> None:
    bench = VirtualBench()
    outcome = await tune(tmp_path, bench, budget_s)
    assert bench.now <= budget_s
    assert all_speeds()[outcome.best] >= all_speeds()[outcome.start]


async def test_more_budget_finds_more(tmp_path: Path) -> None:
    found = [all_speeds()[(await tune(tmp_path / f"{s}", VirtualBench(), s)).best] for s in (300.0, 1500.0, 20_000.0)]
    assert found == sorted(found)
    assert found[0] < found[-1]


async def test_a_setting_that_does_not_start_is_a_finding(tmp_path: Path) -> None:
    outcome = await tune(tmp_path, VirtualBench())
    failed = [one for one in outcome.records if dict(one.values)["max_num_batched_tokens"] == 8192]
    assert [outcome.records[one].failure for one in failed] == ["out of memory"]


async def test_the_fastest_meets_the_start_in_pairs(tmp_path: Path) -> None:
    outcome = await tune(tmp_path, VirtualBench(), levers=SMALL)
    assert outcome.best == outcome.fastest
    assert outcome.pairs == [(speed(START), speed(outcome.best.applied_to(START)))] * 3
    assert outcome.reason == "1.131 times the start's tokens/s in 3 alternating pairs"
    again = VirtualBench()
    assert (await tune(tmp_path, again, levers=SMALL)).pairs == outcome.pairs
    assert again.starts == 0


async def test_a_start_that_is_far_behind_needs_no_pairs(tmp_path: Path) -> None:
    outcome = await tune(tmp_path, VirtualBench())
    assert all_speeds()[outcome.best] > 2 * all_speeds()[outcome.start]
    assert outcome.pairs == []
    assert outcome.reason.endswith("times the start's tokens/s, too far ahead to need pairs")


async def test_what_was_only_luck_is_not_kept(tmp_path: Path) -> None:
    """Every other setting is measured faster than it is, until it meets the start in pairs."""
    outcome = await tune(tmp_path, VirtualBench(lies=2.5), levers=[Lever("max_num_seqs", (8, 4))])
    assert outcome.best == outcome.start
    assert dict(outcome.fastest.values) == {"max_num_seqs": 4}
    assert outcome.reason.startswith("the start is kept: the fastest setting reached 0.")


async def test_a_start_that_is_best_is_kept_without_pairs(tmp_path: Path) -> None:
    outcome = await tune(tmp_path, VirtualBench(), levers=[Lever("max_num_seqs", (8, 4))])
    assert outcome.best == outcome.start
    assert outcome.pairs == []


async def test_it_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    whole = await tune(tmp_path / "whole", VirtualBench())
    first = VirtualBench()
    await tune(tmp_path / "cut", first, budget_s=1000)
    second = VirtualBench()
    outcome = await tune(tmp_path / "cut", second)
    assert outcome.best == whole.best
    assert first.starts > 5
    assert outcome.spent_s >= first.now, "what the first sitting took counts"
    third = VirtualBench()
    again = await tune(tmp_path / "cut", third)
    assert (third.starts, again.best, again.pairs) == (0, outcome.best, outcome.pairs)


async def test_levers_in_another_order_go_on_too(tmp_path: Path) -> None:
    whole = await tune(tmp_path, VirtualBench())
    bench = VirtualBench()
    again = await tune(tmp_path, bench, levers=LEVERS[::-1])
    assert dict(again.start.values) == dict(whole.start.values)
    assert bench.starts < len(again.records), "not even the start would be known"


async def test_a_start_that_cannot_be_measured_is_an_error(tmp_path: Path) -> None:
    class Broken(VirtualBench):
        async def measure(self, engine: EngineConfig, runs: Sequence[int], start_s: float, run_s: float) -> Measured:
            return Measured(failure="no such model")

    with pytest.raises(ConfigError, match="the starting configuration cannot be measured: no such model"):
        await tune(tmp_path, Broken())


async def test_pairs_that_break_off_keep_the_start(tmp_path: Path) -> None:
    class Dying(VirtualBench):
        async def rounds(
            self, engines: Sequence[EngineConfig], runs: Sequence[int], start_s: float, run_s: float
        ) -> AsyncGenerator[tuple[float, ...]]:
            yield tuple(map(speed, engines))
            raise EngineFailed("it died", replica_id="tune-1")

    outcome = await tune(tmp_path, Dying(), levers=SMALL)
    assert outcome.best == outcome.start
    assert "1 of 3 final pairs were run" in outcome.reason
    assert "it died" in outcome.reason


async def test_a_start_far_slower_than_the_best_is_measured_to_its_end(tmp_path: Path) -> None:
    levers = [Lever("max_num_seqs", (1, 64)), Lever("max_cudagraph_capture_size", (16, 64))]
    slow = START.model_copy(update={"max_num_seqs": 1})
    journal = Journal(tmp_path / "journal.jsonl", {})
    bench = VirtualBench()
    tuner = Tuner(slow, levers, bench, journal, budget_s=1e6, pairs=3, report=lambda _: None, clock=bench.clock)
    outcome = await tuner.run()
    assert not outcome.records[outcome.start].failure
    assert speed(outcome.best.applied_to(slow)) > 10 * speed(slow)


async def test_what_is_expected_is_measured_second_and_searched_around(tmp_path: Path) -> None:
    """With too little time for anything else it is found all the same."""
    speeds = all_speeds()
    best = max(speeds, key=lambda one: speeds[one])
    outcome = await tune(tmp_path, VirtualBench(), budget_s=550.0, expected=best)
    assert list(outcome.records)[:2] == [outcome.start, best]
    assert outcome.best == best
    assert (await tune(tmp_path / "unexpected", VirtualBench(), budget_s=550.0)).best != best


async def test_an_expectation_that_does_not_start_is_a_finding(tmp_path: Path) -> None:
    broken = Setting((("max_num_seqs", 64), ("max_num_batched_tokens", 8192), ("max_cudagraph_capture_size", 64)))
    outcome = await tune(tmp_path, VirtualBench(), expected=broken)
    assert outcome.records[broken].failure == "out of memory"
    speeds = all_speeds()
    assert speeds[outcome.best] > 0.99 * max(speeds.values())


async def test_the_best_is_held_against_a_known_configuration_in_the_same_runs(tmp_path: Path) -> None:
    known = START.model_copy(update={"max_num_seqs": 16})
    outcome = await tune(tmp_path, VirtualBench(), against=known)
    assert outcome.against == [(speed(known), speed(outcome.best.applied_to(START)))] * 3
    assert outcome.against_known == pytest.approx(outcome.against[0][1] / speed(known))
    kept = await tune(tmp_path / "kept", VirtualBench(), levers=[Lever("max_num_seqs", (8, 4))], against=known)
    assert kept.pairs == []
    assert kept.against == [(speed(known), speed(START))] * 3


@pytest.mark.parametrize(("ratio", "is_kept"), [(1.2, True), (1.05, False)])
async def test_final_pairs_that_the_budget_ends_count_where_they_leave_no_doubt(
    tmp_path: Path, ratio: float, is_kept: bool
) -> None:
    class Slowing(VirtualBench):
        async def rounds(
            self, engines: Sequence[EngineConfig], runs: Sequence[int], start_s: float, run_s: float
        ) -> AsyncGenerator[tuple[float, ...]]:
            yield 100.0, 100.0 * ratio
            raise TimeoutError

    outcome = await tune(tmp_path, Slowing(), levers=SMALL)
    assert (outcome.best == outcome.fastest) is is_kept
    kept = "the start is kept: 1 of 3 final pairs were run: the budget was over"
    assert outcome.reason == ("1.200 times the start's tokens/s in 1 alternating pairs" if is_kept else kept)


@pytest.mark.parametrize("against", [None, START])
async def test_pairs_of_a_slow_start_leave_time_for_something_to_meet_it(
    tmp_path: Path, against: EngineConfig | None
) -> None:
    """Ten final pairs of it would take more than the whole budget, until it is known that none are needed."""
    speeds = all_speeds()
    best = max(speeds, key=lambda one: speeds[one])
    slow = START.model_copy(update={"max_num_seqs": 1})
    levers = [Lever("max_num_seqs", (1, 64)), *LEVERS[1:]]
    bench = VirtualBench()
    budget_s = START_S * 5 + 6 * TOKENS / speed(slow)
    journal = Journal(tmp_path / "journal.jsonl", {})
    tuner = Tuner(
        slow, levers, bench, journal, budget_s=budget_s, pairs=10, report=lambda _: None, clock=bench.clock,
        expected=best, against=against,
    )  # fmt: skip
    assert (await tuner.run()).fastest == best


async def test_a_first_start_that_takes_longer_leaves_time_to_try_something(tmp_path: Path) -> None:
    """Nothing of the engine is in the page cache then."""

    class Cold(VirtualBench):
        async def measure(self, engine: EngineConfig, runs: Sequence[int], start_s: float, run_s: float) -> Measured:
            measured = await super().measure(engine, runs, start_s, run_s)
            if self.starts > 1:
                return measured
            self.now += START_S
            return dataclasses.replace(measured, start_s=2 * START_S)

    bench = Cold()
    outcome = await tune(tmp_path, bench, budget_s=8.5 * START_S, levers=SMALL)
    assert outcome.best != outcome.start
    assert len(outcome.pairs) == 3
    assert bench.now < 8.5 * START_S


async def test_short_runs_of_one_start_spare_others(tmp_path: Path) -> None:
    """A setting is started once for its first runs, and not again while they leave no doubt."""
    bench = VirtualBench()
    outcome = await tune(tmp_path, bench, levers=[Lever("max_num_seqs", (8, 64))])
    (other,) = (record for setting, record in outcome.records.items() if setting != outcome.start)
    assert len(other.speeds) == 4
    assert bench.starts == 2


def test_each_measurement_says_how_far_the_search_is(tmp_path: Path) -> None:
    lines: list[str] = []
    bench = VirtualBench()
    journal = Journal(tmp_path / "journal", {})
    tuner = Tuner(
        START, LEVERS, bench, journal, budget_s=1800, pairs=3, report=lines.append, clock=bench.clock
    )  # fmt: skip
    asyncio.run(tuner.run())
    told = [re.match(r"setting (\d+) of about (\d+), (\d+) min left: ", line) for line in lines]
    found = [tuple(map(int, one.groups())) for one in told if one]
    assert len(found) > 3
    assert all(number <= about <= 90 for number, about, _ in found)
    assert [left for _, _, left in found] == sorted((left for _, _, left in found), reverse=True)


def test_settings_at_a_tenth_of_the_best_are_cut_off_early(tmp_path: Path) -> None:
    """Once the best is far ahead of the start, no setting may take three times as long as it."""
    bench = VirtualBench()
    journal = Journal(tmp_path / "journal", {})
    tuner = Tuner(START, LEVERS, bench, journal, budget_s=7200, pairs=3, report=lambda _: None, clock=bench.clock)
    outcome = asyncio.run(tuner.run())
    best_s = outcome.records[outcome.best].run_s
    late = list(outcome.records.values())[-5:]
    assert outcome.best != outcome.start
    assert all(record.run_s <= 3.01 * best_s for record in late)
