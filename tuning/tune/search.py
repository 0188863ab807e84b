"""The search of `tune`: the start and each setting of a grid are measured, and the fastest meets the start in pairs."""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from engines.config import EngineConfig
from engines.errors import ConfigError, DeadlineExceeded, EngineError
from tuning.tune.bench import Bench, Running
from tuning.tune.levers import Setting, applied, text_of

# A setting is better than another when it is faster by more than this; runs of one engine differ by about as much.
_GAIN = 0.01
_RUNS = 2
# A run is cut off after so many times the start's: a setting that is slower than the start is of no use.
_SLOWER = 1.5
# So many times the start's speed need no pairs.
_BEYOND_DOUBT = 2.0
# The runs of the final pairs have prompts of their own.
_FIRST_PAIR = 1000
# Runs for each start in the pairs.
_RUNS_A_START = 2
# Factor on the estimated time of the pairs.
_RESERVE = 1.2


@dataclass(slots=True)
class Record:
    """A setting with tokens/s of its runs, or the reason for none."""

    setting: Setting
    speeds: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def speed(self) -> float:
        """The mean of its runs; 0 for a failed setting."""
        return 0.0 if self.failure else statistics.mean(self.speeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The setting to use, with the evidence. `best` is empty where the start is kept; `pairs` are tokens/s of start and
    favoured in alternating runs; `untried` is the number of settings that the budget left out."""

    best: Setting
    favoured: Setting
    reason: str
    records: list[Record]
    pairs: list[tuple[float, float]]
    untried: int
    spent_s: float


class Tuner:
    """One run of `tune`."""

    def __init__(
        self,
        engine: EngineConfig,
        settings: Sequence[Setting],
        bench: Bench,
        *,
        budget_s: float,
        pairs: int,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._bench = bench
        self._num_pairs = pairs
        self._report = report
        self._clock = clock
        self._budget_s = budget_s
        self._ends_s = clock() + budget_s
        self._start = Record({})
        self._start_s = self._run_s = 0.0

    @property
    def _left_s(self) -> float:
        return self._ends_s - self._clock()

    async def run(self) -> Outcome:
        """Search, and return the outcome. Raise `ConfigError` where the start itself cannot be measured."""
        records = [await self._measured_start()]
        for setting in self._settings:
            if self._left_s - self._reserve_s(records) < self._start_s + _RUNS * self._run_s:
                self._report("the rest of the budget is for the final pairs")
                break
            records.append(await self._measured(setting, _SLOWER * self._run_s))
        favoured = max(records, key=lambda record: record.speed)
        pairs, best, reason = await self._verdict(favoured)
        return Outcome(
            best=best,
            favoured=favoured.setting,
            reason=reason,
            records=records,
            pairs=pairs,
            untried=1 + len(self._settings) - len(records),
            spent_s=self._budget_s - self._left_s,
        )

    def _reserve_s(self, records: Sequence[Record]) -> float:
        """The time of the final pairs; of one while the start alone is known, so that a slow start does not reserve the
        whole budget, and none where no pair will be needed."""
        if max(record.speed for record in records) >= _BEYOND_DOUBT * self._start.speed:
            return 0.0
        pairs = self._num_pairs if len(records) > 1 else 1
        starts = 1 + -(-pairs // _RUNS_A_START)
        return _RESERVE * (starts * self._start_s + 2 * pairs * self._run_s)

    async def _measured_start(self) -> Record:
        began = self._clock()
        self._start = await self._measured({}, self._budget_s)
        if self._start.failure:
            raise ConfigError(f"the start cannot be measured: {self._start.failure}")
        self._run_s = self._bench.tokens / self._start.speed
        self._start_s = self._clock() - began - _RUNS * self._run_s
        return self._start

    async def _measured(self, setting: Setting, run_s: float) -> Record:
        record = Record(setting)
        try:
            async with (
                asyncio.timeout(self._left_s),
                self._bench.serving(applied(self._engine, setting), self._left_s) as running,
            ):
                for number in range(_RUNS):
                    record.speeds.append(self._bench.tokens / await running.run(number, run_s))
        except TimeoutError:
            record.failure = "the budget was over"
        except (EngineError, DeadlineExceeded, ConfigError) as error:
            record.failure = str(error)
        self._report(f"{text_of(setting)}: {self._said(record)}")
        return record

    def _said(self, record: Record) -> str:
        if record.failure:
            return record.failure.splitlines()[0]
        against = f" ({record.speed / self._start.speed - 1:+.1%})" if record.setting else ""
        return f"{record.speed:,.0f} tokens/s{against}"

    async def _verdict(self, favoured: Record) -> tuple[list[tuple[float, float]], Setting, str]:
        gain = favoured.speed / self._start.speed
        if gain <= 1 + _GAIN:
            return [], {}, f"nothing that was measured is faster by more than {_GAIN:.0%}"
        if gain >= _BEYOND_DOUBT:
            return [], favoured.setting, f"{gain:.3g} times the start's tokens/s, too far ahead to need pairs"
        pairs: list[tuple[float, float]] = []
        try:
            async with asyncio.timeout(self._left_s):
                await self._run_pairs(applied(self._engine, favoured.setting), pairs)
        except TimeoutError:
            self._report("the budget was over")
        except (EngineError, DeadlineExceeded) as error:
            return pairs, {}, f"the start is kept: a final run failed: {str(error).splitlines()[0]}"
        is_better, reason = judged([favoured / start for start, favoured in pairs])
        return pairs, favoured.setting if is_better else {}, reason

    async def _run_pairs(self, favoured: EngineConfig, pairs: list[tuple[float, float]]) -> None:
        """Run both in turn, a few runs for each start, the order turned each time."""
        engines, order = [self._engine, favoured], [0, 1]
        async with AsyncExitStack() as stack:
            up: dict[int, Running] = {}
            for first in range(0, self._num_pairs, _RUNS_A_START):
                speeds: list[list[float]] = [[], []]
                for index in order:
                    if index not in up:
                        await stack.aclose()
                        up = {index: await stack.enter_async_context(self._bench.serving(engines[index], self._left_s))}
                    for number in range(first, min(first + _RUNS_A_START, self._num_pairs)):
                        seconds = await up[index].run(_FIRST_PAIR + number, self._left_s)
                        speeds[index].append(self._bench.tokens / seconds)
                for start, other in zip(*speeds, strict=True):
                    pairs.append((start, other))
                    self._report(f"pair {len(pairs)}: start {start:,.0f}, favoured {other:,.0f} tokens/s")
                order.reverse()


def judged(ratios: Sequence[float]) -> tuple[bool, str]:
    """Return True if the favoured setting won, and what the pairs say."""
    if not ratios:
        return False, "the start is kept: the budget was over before the first final pair"
    spread = f"{min(ratios):.3f} to {max(ratios):.3f} times the start's tokens/s in {len(ratios)} alternating pairs"
    if min(ratios) > 1 and statistics.median(ratios) > 1 + _GAIN:
        return True, f"{statistics.median(ratios):.3f} times the start's tokens/s in the median, {spread}"
    if max(ratios) > 1 + _GAIN:
        return False, f"noise is larger than any gain: {spread}"
    return False, f"the start is kept: the favoured setting reached {spread}"
