"""The events of one submission: numbered, readable once they are durable, freed when they are acked."""

import asyncio
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from engines.engine import Json
from engines.errors import InvalidRequest, UnknownCursor
from gateway.dialects.sample import ABORT, UNSCORED, Sample
from gateway.dialects.submissions.frames import OF_GROUP, OF_SUBMISSION, Ack, Event, Growth, Head, Step
from gateway.dialects.submissions.group_run import DEADLINE, GroupRun, Outcome
from gateway.dialects.submissions.words import Group
from gateway.fleet.metrics import Deliveries, Metrics
from gateway.ledger.ledger import Record

_GOOD = "good"
_LIFE_BITS = 20
_ENDED = "ended"
_AT_ONCE = 256  # events
_BYTES_AT_ONCE = 1 << 18


@dataclass(eq=False)
class Counts:
    """Counts samples and tokens of submissions in the gateway's metrics."""

    metrics: Metrics
    deliveries: Deliveries

    def sample(self, run: GroupRun, num_tokens: int, report: Json) -> None:
        self.metrics.missing_logprobs.inc(report.get(UNSCORED, 0))
        if run.model:
            self.metrics.completion_tokens.inc(num_tokens, run.model)
        if report["finish_reason"] != DEADLINE:
            self.deliveries.count(run.model, [report])

    def group(self, run: GroupRun) -> None:
        if run.model:
            self.metrics.prompt_tokens.inc(len(run.prompt), run.model)


class Submission:
    """Groups under one id, of one owner. `life` is the number of the gateway's life."""

    def __init__(self, head: Head, groups: Sequence[Group], record: Record, counts: Counts, life: int) -> None:
        self.head = msgspec.structs.replace(head, groups=b"")
        self.record, self.life = record, life
        record.growth_of = self._growth_of
        self.owner, self.id = head.owner, head.id
        self.acked = head.acked
        self.outcomes: dict[int, str] = {}
        self.runs = [GroupRun(group, index, self.owner, self.id, self) for index, group in enumerate(groups)]
        self.task: asyncio.Task[None] | None = None
        self.readers = 0
        self.quiet_since = time.monotonic()
        self.is_ended = False
        self.is_released = False
        self.opened = asyncio.Event()
        """Set once the ledger has the submission."""
        self._event_bytes = 0
        self._body_bytes = sum(group.num_bytes for group in groups)
        self._events: list[Event] = []
        self._last = 0
        self._durable = 0
        self._news = asyncio.Event()
        self._counts = counts

    # State

    @property
    def outcome_counts(self) -> Json:
        counts = Counter(self.outcomes.values())
        return {str(outcome): counts[outcome] for outcome in Outcome if counts[outcome]}

    @property
    def num_bytes(self) -> int:
        """Size of what is kept for clients, of the groups, and of open samples."""
        return self._body_bytes + self._event_bytes + sum(run.num_bytes for run in self.runs)

    @property
    def is_acked(self) -> bool:
        return self.is_ended and self.acked == self._last

    def running(self, groups: Iterable[int] | None) -> list[GroupRun]:
        """The groups that have not ended; of those named, if any are."""
        runs = self.runs if groups is None else [self.runs[index] for index in groups]
        return [run for run in runs if run.index not in self.outcomes]

    def report(self) -> Json:
        """The state, as a stream begins with it."""
        return {
            "type": "submission",
            "id": self.id,
            "cursor": self.acked,
            "ended": self.is_ended,
            "groups": len(self.runs),
            "outcomes": self.outcome_counts,
        }

    # Writes

    def write(self, groups: bytes) -> None:
        """Begin the record, with its groups in JSON."""
        self.record.begin(msgspec.structs.replace(self.head, acked=self.acked, groups=groups), self.opened.set)

    def _growth_of(self, group: int) -> list[Growth]:
        return [] if group in self.outcomes else self.runs[group].made.growth()

    # Events

    def grew(self, run: GroupRun) -> None:
        self.record.grew(run.index)

    def ended(self, run: GroupRun, sample: Sample, reason: str) -> None:
        report = run.made.report(sample, reason)
        mark = str(reason) if reason in (DEADLINE, ABORT) else _GOOD
        self._emit({"type": "sample", "group": run.index, **report}, run.index, sample.index, mark)
        self._counts.sample(run, sample.num_made, report)

    def end_group(self, run: GroupRun, outcome: Outcome, error: Json | None = None) -> None:
        self._counts.group(run)
        report: Json = {"type": "group", "group": run.index, "outcome": outcome}
        if error is not None:
            report["error"] = error
        if run.is_read_by_engine and run.prompt:
            report["prompt_token_ids"] = array("i", run.prompt).tobytes()
        run.drop()
        self.outcomes[run.index] = outcome
        self._emit(report, run.index, OF_GROUP, outcome)

    def end(self) -> None:
        """All groups have ended."""
        self.is_ended = True
        self._emit({"type": "end", "outcomes": self.outcome_counts}, OF_SUBMISSION, OF_GROUP, _ENDED)

    def _emit(self, report: Json, group: int, sample: int, mark: str) -> None:
        cursor = self._last = max(self._last + 1, (self.life << _LIFE_BITS) + 1)
        event = Event(cursor, group, sample, mark, msgspec.msgpack.encode({"cursor": cursor, **report}))
        self._keep(event)
        self.record.add(event, then=partial(self._is_durable, cursor))

    def _keep(self, event: Event) -> None:
        self._events.append(event)
        self._event_bytes += event.num_bytes

    def _is_durable(self, cursor: int) -> None:
        self._durable = max(self._durable, cursor)
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    # Clients

    async def groups_ended(self, groups: Collection[int]) -> None:
        """Return once these groups have ended and the ledger has that."""
        while not all(group in self.outcomes for group in groups):
            await self._news.wait()
        last = self._last
        while self._durable < last:
            await self._news.wait()

    async def read(self, cursor: int) -> AsyncGenerator[list[bytes]]:
        """Yield the events after `cursor` as they come, some at a time, until the submission has ended."""
        self.check_cursor(cursor)
        self.readers += 1
        try:
            while True:
                news = self._news
                ready = self.ready(cursor)
                if ready:
                    cursor = ready[-1].cursor
                    yield [event.content for event in ready]
                elif (self.is_ended and cursor >= self._last) or self.is_released:
                    return
                else:
                    await news.wait()
        finally:
            self.readers -= 1
            self.quiet_since = time.monotonic()

    def ready(self, cursor: int) -> list[Event]:
        """Return the first events after `cursor` that may be delivered."""
        ready, num_bytes = [], 0
        start = bisect_right(self._events, cursor, key=_cursor)
        for event in self._events[start : start + _AT_ONCE]:
            if event.cursor > self._durable or num_bytes > _BYTES_AT_ONCE:
                break
            num_bytes += len(event.content)
            ready.append(event)
        return ready

    def check_cursor(self, cursor: int) -> None:
        """Raise where no event has this cursor, or where those after it were freed."""
        if cursor < self.acked:
            raise InvalidRequest(
                f"cursor = {cursor}: events up to {self.acked} were acked and are gone; read from cursor {self.acked}",
                param="cursor",
            )
        if cursor == self.acked:
            return
        place = bisect_right(self._events, cursor, key=_cursor) - 1
        if place < 0 or self._events[place].cursor != cursor or cursor > self._durable:
            raise UnknownCursor(
                f"cursor = {cursor} is of no event that {self.id!r} has: the ledger was lost with the events after "
                f"{self.acked}. Read from cursor {self.acked}, and drop samples that you have, by group and sample"
            )

    def ack(self, cursor: int) -> None:
        """Free the events up to `cursor`."""
        if cursor <= self.acked:
            return
        self.check_cursor(cursor)
        self._free(cursor)
        self.record.add(Ack(cursor), then=self._wake)

    def _free(self, cursor: int) -> None:
        self.acked = cursor
        place = bisect_right(self._events, cursor, key=_cursor)
        self._event_bytes -= sum(event.num_bytes for event in self._events[:place])
        del self._events[:place]

    def release(self) -> None:
        """Free all but the id and the cursor."""
        self.is_released = True
        self._event_bytes = self._body_bytes = 0
        self.runs, self._events = [], []
        if self.record.is_kept:
            self.write(b"")
        self._wake()

    # Return

    def restore(self, steps: Iterable[Step]) -> None:
        """Take the steps of a gateway before this one."""
        for step in steps:
            self._take(step)
        self._last = self._durable = max(self.acked, *(event.cursor for event in self._events), 0)
        self.is_released = not self.runs
        self.is_ended = self.is_ended or self.is_released
        self.opened.set()

    def _take(self, step: Step) -> None:
        match step:
            case Event():
                self._keep(step)
                self._take_end(step)
            case Growth(group):
                self.runs[group].made.restore(step)
            case Ack(cursor):
                self._free(cursor)

    def _take_end(self, event: Event) -> None:
        if event.group == OF_SUBMISSION:
            self.is_ended = True
        elif event.sample != OF_GROUP:
            self.runs[event.group].restore_end(event.sample, is_good=event.mark == _GOOD)
        else:
            self.outcomes[event.group] = event.mark
            self.runs[event.group].drop()


def _cursor(event: Event) -> int:
    return event.cursor
