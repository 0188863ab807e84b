"""The search of `tune`: the settings to measure, and the setting to keep.

The start and the setting that other measurements favour come first; the faster is the base. Then successive halving
over settings that differ from the base in a lever: all are run once, the better third twice, the best of them four
times. Changes that helped are combined, and the search repeats from there until nothing helps. At last some settings
are drawn at random. The best setting then meets the start in alternating runs, and is kept if it wins them.
"""

import asyncio
import itertools
import math
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from engines.config import EngineConfig
from engines.errors import ConfigError, DeadlineExceeded, EngineError
from tuning.tune.bench import RUNS_A_START, Bench, Measured
from tuning.tune.journal import Journal
from tuning.tune.levers import Lever, Setting, Value, start_of

# A setting is better than another when it is faster by more than this; runs of one engine differ by about as much.
GAIN = 0.01
_BESIDE = 0.05
_KEEP = 1 / 3
_RUNGS = 3
# Runs of one engine never differ by so much: a setting further ahead needs no second run, and few final pairs.
_CLEAR = 0.1
# A run is cut off after so many times the fastest run so far, and so many times the start's.
_PATIENCE, _SLOWER = 3.0, 1.5
_DRAWN_AT_A_TIME = 6
_DRAWS_WITHOUT_GAIN = 2
_SEED = 0
# Runs may take this share of the engine's start time; no setting gets more runs than the last rung has.
_RUNS_OF_A_START = 0.5
# A start that is behind by more needs no final pairs.
_BEYOND_DOUBT = 1.0
# The runs of the final pairs have prompts of their own.
_FIRST_PAIR = 1000
# Factor on estimates of the time still needed.
_RESERVE = 1.2
_MORE_PAIRS_WON = 0.5
_OVER = "the budget was over"

Report = Callable[[str], None]


@dataclass(slots=True)
class Record:
    """The measurements of a setting."""

    speeds: list[float] = field(default_factory=list)
    start_s: float = 0.0
    run_s: float = 0.0
    failure: str = ""
    cut_off: bool = False

    @property
    def is_broken(self) -> bool:
        """True if it did not run to the end, for another reason than slowness."""
        return bool(self.failure) and not self.cut_off

    @property
    def speed(self) -> float:
        """Tokens/s of a GPU, the median of its runs; 0 for a failed setting."""
        return 0.0 if self.failure or not self.speeds else statistics.median(self.speeds)

    def add(self, measured: Measured) -> None:
        self.speeds += measured.speeds
        self.start_s = max(self.start_s, measured.start_s)
        self.run_s = max(self.run_s, measured.run_s)
        self.failure, self.cut_off = measured.failure, measured.cut_off


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The setting to use, with the evidence."""

    start: Setting
    best: Setting
    """The start where nothing was better."""
    fastest: Setting
    """The fastest setting of the search; the start where that is best."""
    pairs: list[tuple[float, float]]
    """Speeds of start and fastest in alternating runs."""
    against: list[tuple[float, float]]
    """Speeds of the configuration of --against and of `best`, in the same runs."""
    reason: str
    records: dict[Setting, Record]
    spent_s: float
    settings: int
    """The number of possible settings."""

    @property
    def gain(self) -> float | None:
        """Median of fastest / start over the pairs."""
        return statistics.median(ratios(self.pairs)) if self.pairs else None

    @property
    def against_known(self) -> float | None:
        """Median of best / the configuration of --against."""
        return statistics.median(ratios(self.against)) if self.against else None


class BudgetOver(Exception):
    """The rest of the budget is needed for the final pairs."""


class Tuner:
    """One run of `tune`. `budget_s` includes the time of earlier sittings of the same journal.

    `expected` is measured second, the start where there is none. `against` is an engine to compare the best with.
    """

    def __init__(
        self,
        engine: EngineConfig,
        levers: Sequence[Lever],
        bench: Bench,
        journal: Journal,
        *,
        budget_s: float,
        pairs: int,
        report: Report,
        expected: Setting | None = None,
        against: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._levers = list(levers)
        self._bench = bench
        self._journal = journal
        self._budget_s = budget_s
        self._num_pairs = pairs
        self._report = report
        self._clock = clock
        self._began = clock() - journal.spent_s
        self._draw = random.Random(_SEED)
        self.start = self._base = start_of(engine, levers)
        self._expected = expected or self.start
        self._against = against
        self.records: dict[Setting, Record] = {}
        # Measurements of earlier sittings are used as the search reaches them, so that it takes the same way again.
        self._known: dict[Setting, deque[Measured]] = defaultdict(deque)
        for entry in journal.entries:
            if "measured" in entry:
                self._known[self._setting(entry["setting"])].append(_measured(entry))

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began

    async def run(self) -> Outcome:
        """Search, and return the outcome. Raise `ConfigError` where the start itself cannot be measured."""
        if self._known:
            self._report(f"goes on with {len(self._known)} settings that were measured in {self.spent_s:.0f} s")
        await self._measure_start()
        try:
            fastest = await self._search()
        except BudgetOver:
            self._report("the rest of the budget is for the final pairs")
            fastest = self._fastest(self.records)
        return await self._verdict(fastest)

    async def _measure_start(self) -> None:
        # A failure of the start in an earlier sitting may have been fixed.
        self._known[self.start] = deque(known for known in self._known[self.start] if not known.failure)
        if self._known[self.start]:
            self._add(self.start, self._known[self.start].popleft())
        left_s = self._budget_s - self.spent_s
        try:
            await self._measure(self.start, self._missing(self.start, 1), left_s, left_s)
        except BudgetOver:
            message = f"--budget: the start could not be measured within {self._budget_s:.0f} s; give more"
            raise ConfigError(message) from None
        if failure := self.records[self.start].failure:
            raise ConfigError(f"the starting configuration cannot be measured: {failure}")

    async def _search(self) -> Setting:
        if self._expected != self.start and self._is_possible(self._expected):
            await self._measure_all([self._expected], self._runs_of_a_start(self.start))
            self._base = self._fastest([self._expected])
        best = await self._halve(self._base, self._one_change(self._base))
        while better := await self._better(best, [*self._combined(best), *self._promising(best)]):
            best = better
        idle = 0
        while idle < _DRAWS_WITHOUT_GAIN and (drawn := self._drawn()):
            better = await self._better(best, drawn)
            idle, best = (0, better) if better else (idle + 1, best)
        return best

    async def _better(self, best: Setting, settings: Sequence[Setting]) -> Setting | None:
        winner = await self._halve(best, settings)
        return winner if winner != best else None

    async def _halve(self, best: Setting, settings: Sequence[Setting]) -> Setting:
        """Return the winner of these and `best`, which stays if no setting is faster by more than `GAIN`."""
        alive = [setting for setting in dict.fromkeys(settings) if setting != best]
        if not alive:
            return best
        for rung in range(_RUNGS):
            runs = max(2**rung, self._runs_of_a_start(best))
            await self._measure_all([best, *alive] if rung else alive, runs)
            alive = [setting for setting in alive if self.records[setting].speed > 0]
            alive.sort(key=lambda setting: -self.records[setting].speed)
            # Engines that run beside each other are a little slower than the start was alone.
            margin = -_BESIDE if rung == 0 and self._bench.side_by_side(self._engine) > 1 else GAIN
            better = [setting for setting in alive if self._is_better(setting, best, margin)]
            alive = better[: math.ceil(len(alive) * _KEEP)]
            if not alive:
                return best
            others = (best, *alive[1:])
            if (rung and len(alive) == 1) or all(self._is_better(alive[0], other, _CLEAR) for other in others):
                break
        return alive[0]

    def _runs_of_a_start(self, setting: Setting) -> int:
        """Return the runs of each start: several where starts are long and runs short, to save further starts."""
        known = self.records[setting]
        worth = int(_RUNS_OF_A_START * known.start_s / known.run_s)
        return int(min(max(worth, 1), 2 ** (_RUNGS - 1)))

    def _is_better(self, setting: Setting, other: Setting, margin: float = GAIN) -> bool:
        return self.records[setting].speed > (1 + margin) * self.records[other].speed

    def _one_change(self, best: Setting) -> list[Setting]:
        """Return every setting that differs from `best` in one lever. Changes back to the start come last."""
        changed = [best.changed_to(lever.name, value) for lever in self._levers for value in lever.values]
        changed.sort(key=lambda setting: len(setting.changes_from(self.start)) < len(best.changes_from(self.start)))
        return [setting for setting in changed if setting not in (best, self.start) and self._is_possible(setting)]

    def _combined(self, best: Setting) -> list[Setting]:
        """Return the setting of all changes that helped alone; none if it is known or not possible."""
        combined = best
        for lever in self._levers:
            changed = [self._base.changed_to(lever.name, value) for value in lever.values]
            winner = max(filter(self.records.__contains__, changed), key=lambda setting: self.records[setting].speed)
            if self._is_better(winner, self._base):
                combined = combined.changed_to(lever.name, dict(winner.values)[lever.name])
        return [combined] if combined not in self.records and self._is_possible(combined) else []

    def _promising(self, best: Setting) -> list[Setting]:
        """Return untried changes of `best`, without changes that did harm alone."""
        floor = (1 - GAIN) * self.records[self._base].speed
        found = []
        for setting in self._one_change(best):
            (name, value), *_ = setting.changes_from(best).items()
            alone = self.records.get(self._base.changed_to(name, value))
            if setting not in self.records and (alone is None or alone.speed >= floor):
                found.append(setting)
        return found

    def _drawn(self) -> list[Setting]:
        """Return some untried settings, without values that failed alone."""
        rest = [
            setting
            for setting in self._all()
            if setting not in self.records and self._is_possible(setting) and not self._has_failed(setting)
        ]
        return self._draw.sample(rest, min(len(rest), _DRAWN_AT_A_TIME))

    def _has_failed(self, setting: Setting) -> bool:
        alone = (self._base.changed_to(name, value) for name, value in setting.changes_from(self._base).items())
        return any(setting in self.records and self.records[setting].is_broken for setting in alone)

    def _all(self) -> Iterator[Setting]:
        names = [lever.name for lever in self._levers]
        for values in itertools.product(*(lever.values for lever in self._levers)):
            yield Setting(tuple(zip(names, values, strict=True)))

    def _setting(self, values: Mapping[str, Value]) -> Setting:
        """Return the setting of these values, in the levers' present order."""
        return Setting(tuple((lever.name, values[lever.name]) for lever in self._levers))

    def _is_possible(self, setting: Setting) -> bool:
        """Return False for values that exclude each other."""
        try:
            setting.applied_to(self._engine)
        except ConfigError:
            return False
        return True

    def _fastest(self, settings: Sequence[Setting] | dict[Setting, Record]) -> Setting:
        """Return the fastest of these settings; the start if none is faster."""
        best = self.start
        for setting in settings:
            best = setting if self.records[setting].speed > self.records[best].speed else best
        return best

    async def _measure_all(self, settings: Sequence[Setting], runs: int) -> None:
        """Measure each setting until it has `runs` runs, as many at a time as do not disturb each other."""
        at_a_time = asyncio.Semaphore(self._bench.side_by_side(self._engine))

        async def measure(setting: Setting) -> None:
            async with at_a_time:
                await self._measure_within_budget(setting, runs)

        results = await asyncio.gather(*map(measure, settings), return_exceptions=True)
        for error in sorted(filter(None, results), key=lambda error: isinstance(error, BudgetOver)):
            raise error

    async def _measure_within_budget(self, setting: Setting, runs: int) -> None:
        while self._known[setting] and self._missing(setting, runs):
            self._add(setting, self._known[setting].popleft())
        if not (missing := self._missing(setting, runs)):
            return
        left_s = self._budget_s - self.spent_s - self._reserve_s
        affordable = int((left_s - self._usual_start_s) / self._shortest_run_s)
        if affordable < 1:
            raise BudgetOver
        run_s = _PATIENCE * self._shortest_run_s
        if not self._is_far_ahead(self._fastest(self.records)):
            # A setting that changes nothing is as slow as the start, and should not be cut off.
            run_s = max(run_s, _SLOWER * self.records[self.start].run_s)
        await self._measure(setting, min(missing, affordable), left_s, run_s)

    def _missing(self, setting: Setting, runs: int) -> int:
        """Return the number of runs that the setting still needs."""
        record = self.records.get(setting, Record())
        return 0 if record.failure else max(0, runs - len(record.speeds))

    async def _measure(self, setting: Setting, runs: int, left_s: float, run_s: float) -> None:
        """Run a setting `runs` times more. The end of the budget cuts runs off without a failure of the setting."""
        if not runs:
            return
        before = len(self.records[setting].speeds) if setting in self.records else 0
        numbers = range(before, before + runs)
        try:
            async with asyncio.timeout(left_s):
                measured = await self._bench.measure(setting.applied_to(self._engine), numbers, left_s, run_s)
        except TimeoutError:
            raise BudgetOver from None
        self._add(setting, measured)
        self._journal.add_measured(setting, measured, self.spent_s)
        self._report(f"{self._progress()}: {setting.changes_text(self.start)}: {self._said(setting)}")

    def _progress(self) -> str:
        """Return a line with settings measured, the number that the budget allows, and the time left."""
        if not any(record.speed for record in self.records.values()):
            return "setting 1"
        left_s = max(0.0, self._budget_s - self.spent_s)
        more = int(max(0.0, left_s - self._reserve_s) / (self._usual_start_s + self._shortest_run_s))
        about = min(self._num_settings, len(self.records) + more)
        return f"setting {len(self.records)} of about {about}, {left_s / 60:.0f} min left"

    def _said(self, setting: Setting) -> str:
        record, start = self.records[setting], self.records[self.start]
        if record.failure:
            return record.failure.splitlines()[0]
        against = f" ({record.speed / start.speed - 1:+.1%})" if setting != self.start and start.speed else ""
        return f"{record.speed:,.0f} tokens/s{against}, {len(record.speeds)} runs"

    def _add(self, setting: Setting, measured: Measured) -> None:
        record = self.records.setdefault(setting, Record())
        record.add(measured)
        if setting == self.start and record.speeds:
            record.failure = ""  # all settings are compared with it; its failures show in the pairs

    @property
    def _num_settings(self) -> int:
        return math.prod(len(lever.values) for lever in self._levers)

    @property
    def _usual_start_s(self) -> float:
        """Start time of engines whose files were read before: the first start on an H200 took twice as long."""
        others = (record.start_s for setting, record in self.records.items() if record.speed and setting != self.start)
        return statistics.median([*others] or [self.records[self.start].start_s])

    @property
    def _shortest_run_s(self) -> float:
        return min(record.run_s for record in self.records.values() if record.speed)

    @property
    def _reserve_s(self) -> float:
        """The time that the final pairs will take.

        With only the start measured, it is the time of one pair: a slow start must not reserve the whole budget.
        """
        num_pairs, margin, engines = self._num_pairs, _RESERVE, self._finalists(self._fastest(self.records))
        if len(self.records) == 1:
            num_pairs, margin, engines = 1, 1.0, {"start": self._engine}
        if len(engines) < 2:
            engines["fastest"] = self._engine  # that is still to be found
        turns = 1 if self._bench.all_fit(list(engines.values())) else math.ceil(num_pairs / RUNS_A_START)
        starts = len(engines) + (turns - 1) * (len(engines) - 1)
        run_s = (len(engines) - 1) * self._shortest_run_s
        run_s += self.records[self.start].run_s if "start" in engines else self._shortest_run_s
        return margin * (starts * self._usual_start_s + num_pairs * run_s)

    def _finalists(self, fastest: Setting) -> dict[str, EngineConfig]:
        """Return the engines of the final runs by role, without a start that is far behind: it needs no proof."""
        engines = {}
        if not self._is_far_ahead(fastest):
            engines["start"] = self._engine
        if fastest != self.start:
            engines["fastest"] = fastest.applied_to(self._engine)
        if self._against is not None:
            engines["against"] = self._against
        return engines

    def _is_far_ahead(self, fastest: Setting) -> bool:
        return self._is_better(fastest, self.start, _BEYOND_DOUBT)

    async def _verdict(self, fastest: Setting) -> Outcome:
        best, reason = self.start, "nothing that was measured is faster by more than 1 %"
        if not self._is_better(fastest, self.start):
            fastest = self.start
        rounds, failure = await self._rounds(fastest)
        pairs = [(speeds["start"], speeds["fastest"]) for speeds in rounds if speeds.keys() >= {"start", "fastest"}]
        if self._is_far_ahead(fastest):
            gain = self.records[fastest].speed / self.records[self.start].speed
            best, reason = fastest, f"{gain:.3g} times the start's tokens/s, too far ahead to need pairs"
        elif fastest != self.start:
            best, reason = self._judge(fastest, pairs, failure)
        role = "start" if best == self.start else "fastest"
        return Outcome(
            start=self.start,
            best=best,
            fastest=fastest,
            pairs=pairs,
            against=[(speeds["against"], speeds[role]) for speeds in rounds if "against" in speeds],
            reason=reason,
            records=self.records,
            spent_s=self.spent_s,
            settings=self._num_settings,
        )

    async def _rounds(self, fastest: Setting) -> tuple[list[dict[str, float]], str]:
        """Return speeds by role of the final runs, earlier sittings' included, and a reason if there are too few."""
        engines = self._finalists(fastest)
        rounds = self._journal.rounds(fastest, engines)
        numbers = range(_FIRST_PAIR + len(rounds), _FIRST_PAIR + self._num_pairs)
        if len(engines) == 1 or not numbers:
            return rounds, ""
        left_s = self._budget_s - self.spent_s
        run_s = _PATIENCE * max(self.records[setting].run_s for setting in (self.start, fastest))
        try:
            async with (
                asyncio.timeout(left_s),
                aclosing(self._bench.rounds(list(engines.values()), numbers, left_s, run_s)) as runs,
            ):
                async for speeds in runs:
                    rounds.append(dict(zip(engines, speeds, strict=True)))
                    self._journal.add_round(fastest, engines, rounds[-1], self.spent_s)
                    line = ", ".join(f"{role} {speed:,.0f}" for role, speed in rounds[-1].items())
                    self._report(f"pair {len(rounds)}: {line} tokens/s")
        except (EngineError, DeadlineExceeded) as error:
            return rounds, str(error).splitlines()[0]
        except TimeoutError:
            return rounds, _OVER
        return rounds, ""

    def _judge(self, fastest: Setting, pairs: list[tuple[float, float]], failure: str) -> tuple[Setting, str]:
        # Fewer pairs, after the end of the budget, are enough where they leave no doubt.
        if len(pairs) < self._num_pairs and (failure != _OVER or not pairs or min(ratios(pairs)) < 1 + _CLEAR):
            return self.start, f"the start is kept: {len(pairs)} of {self._num_pairs} final pairs were run: {failure}"
        found = ratios(pairs)
        won = sum(ratio > 1 for ratio in found) / len(found)
        result = f"{statistics.median(found):.3f} times the start's tokens/s in {len(found)} alternating pairs"
        if statistics.median(found) > 1 + GAIN and won > _MORE_PAIRS_WON:
            return fastest, result
        return self.start, f"the start is kept: the fastest setting reached {result}"


def ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [best / start for start, best in pairs]


def _measured(entry: dict[str, object]) -> Measured:
    values = entry["measured"]
    assert isinstance(values, dict)
    return Measured(**{**values, "speeds": tuple(values["speeds"])})
