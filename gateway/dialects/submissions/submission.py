"""The events of one submission: numbered, readable once they are durable, freed when they are acked."""

import asyncio
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import msgspec
import orjson

from engines.engine import Json
from engines.errors import InvalidRequest, UnknownCursor
from gateway.dialects.submissions.group_run import DEADLINE, GroupRun, Outcome
from gateway.dialects.submissions.sample import Sample
from gateway.dialects.submissions.words import Group
from gateway.ledger.file import OF_GROUP, OF_SUBMISSION, EventRow, LedgerFile, PartRow, SubmissionRow

TAKEN = "taken"
"""The mark of a suspended group that another submission goes on with."""
_GOOD = "good"
_OBJECT_BYTES = 300  # of an event, beside its content
_LIFE_BITS = 20
_ENDED = "ended"
_AT_ONCE = 256  # events
_BYTES_AT_ONCE = 1 << 18

Put = Callable[[Callable[[LedgerFile], None], Callable[[], None]], None]
"""Writes to the ledger, then calls."""


class Counts(Protocol):
    """Counts samples that are delivered, groups that end, and submissions that the ledger has no room for."""

    def sample(self, run: GroupRun, sample: Sample) -> None: ...
    def group(self, run: GroupRun) -> None: ...
    def outgrew(self) -> None: ...


def _nothing() -> None:
    pass


class Submission:
    """Groups under one id, of one owner."""

    def __init__(
        self,
        number: int,
        owner: str,
        name: str,
        digest: bytes,
        groups: Sequence[Group],
        began: float,
        put: Put,
        counts: Counts,
    ) -> None:
        self.number, self.owner, self.id, self.digest = number, owner, name, digest
        self.began = began
        """Time of its arrival in seconds since the epoch."""
        self.acked = 0
        self.outcomes: dict[int, str] = {}
        self.runs = [GroupRun(group, index, owner, name, self) for index, group in enumerate(groups)]
        self.task: asyncio.Task[None] | None = None
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.cancelled: dict[int, str] = {}
        """Reasons, by group."""
        self.overdue: set[int] = set()
        """Groups whose deadline the client has let pass."""
        self.readers = 0
        self.quiet_since = time.monotonic()
        self.is_ended = False
        self.is_released = False
        self.has_outgrown = False
        """True where the ledger has no room for it: it goes on in memory alone."""
        self._event_bytes = self._body_bytes = 0
        self.opened = asyncio.Event()
        """Set once the ledger has the submission."""
        self.life = 0
        self._ledger = put
        self._events: list[EventRow] = []
        self._marks: list[EventRow] = []  # events that were acked, without their content
        self._last = 0
        self._durable = 0
        self._news = asyncio.Event()
        self._grown: dict[tuple[int, int], None] = {}
        self._writing = 0
        self._taken: list[tuple[Submission, int]] = []  # groups of others, until this one is written
        self._counts = counts

    # State

    @property
    def outcome_counts(self) -> Json:
        counts = Counter(Outcome.SUSPENDED if mark == TAKEN else mark for mark in self.outcomes.values())
        return {str(outcome): counts[outcome] for outcome in Outcome if counts[outcome]}

    @property
    def num_bytes(self) -> int:
        """Size of what is kept for clients, of the groups, and of open samples."""
        return self._body_bytes + self._event_bytes + sum(run.num_bytes for run in self.runs)

    @property
    def num_unwritten(self) -> int:
        """Open samples whose last tokens the ledger lacks."""
        return len(self._grown) + self._writing

    @property
    def is_writing(self) -> bool:
        """True while tokens are on their way into the ledger."""
        return self._writing > 0

    @property
    def has_suspended(self) -> bool:
        return Outcome.SUSPENDED in self.outcomes.values()

    @property
    def is_acked(self) -> bool:
        return self.is_ended and self.acked == self._last

    def is_stopped(self, group: int) -> bool:
        """True where the client has ended the group."""
        return group in self.cancelled or group in self.overdue

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

    def _put(self, work: Callable[[LedgerFile], None], then: Callable[[], None]) -> None:
        if self.has_outgrown:
            then()
        else:
            self._ledger(work, then)

    def write(self) -> None:
        """Write the submission, with all that it has, into a new ledger."""
        row, taken = self._row(), [(source.number, group) for source, group in self._taken]
        self._taken = []

        def work(file: LedgerFile) -> None:
            file.add_submission(row)
            for source, group in taken:  # in the same transaction: the tokens are in one of both, whatever happens
                file.give_up(source, group, TAKEN)

        self._put(work, self.opened.set)

    def _row(self) -> SubmissionRow:
        groups = [] if self.is_released else [run.group for run in self.runs]
        body = orjson.dumps(groups) if groups else b""
        self._body_bytes = len(body)
        row = SubmissionRow(self.number, self.owner, self.id, self.digest, body, self.began, self.acked)
        row.events = [] if self.is_released else [self._as_now(event) for event in (*self._marks, *self._events)]
        self._grown.clear()
        for run in () if self.is_released else self.runs:
            if run.is_read_by_engine:
                row.prompts[run.index] = orjson.dumps(run.read)
            if run.num_bytes and self.outcomes.get(run.index) in (None, Outcome.SUSPENDED):
                for sample in run.open:
                    if part := sample.everything():
                        row.parts[run.index, sample.index].append(part)
        return row

    def _as_now(self, event: EventRow) -> EventRow:
        """The event, with the mark of a group that was suspended, and taken or dropped since."""
        is_of_group = event.sample == OF_GROUP and event.group != OF_SUBMISSION
        return replace(event, mark=self.outcomes[event.group]) if is_of_group else event

    def write_growth(self) -> None:
        """Write the tokens that open samples have got since the last call."""
        grown, self._grown = self._grown, {}
        for group, index in grown:
            run, sample = self.runs[group], self.runs[group].samples[index]
            if not sample.is_open:
                continue
            part = sample.growth()
            if part is None:
                continue
            if part.start == 0:
                self._write_prompt(run)
            self._writing += 1
            self._put(partial(_grow, self.number, group, index, part), self._wrote)

    def _wrote(self) -> None:
        self._writing -= 1

    def _write_prompt(self, run: GroupRun) -> None:
        if run.is_read_by_engine:
            token_ids = orjson.dumps(run.read)
            self._put(lambda file: file.read_prompt(self.number, run.index, token_ids), _nothing)

    def forgot(self, run: GroupRun, sample: Sample) -> None:
        self._put(lambda file: file.begin_again(self.number, run.index, sample.index), _nothing)

    # Events

    def grew(self, run: GroupRun, sample: Sample) -> None:
        self._grown[run.index, sample.index] = None

    def ended(self, run: GroupRun, sample: Sample) -> None:
        report = sample.report(DEADLINE)
        mark = _GOOD if sample.counts else str(report["finish_reason"])
        self._emit({"type": report.pop("type"), "group": run.index, **report}, run.index, sample.index, mark)
        self._grown.pop((run.index, sample.index), None)
        self._counts.sample(run, sample)
        sample.deliver()

    def end_group(self, run: GroupRun, outcome: Outcome, error: Json | None = None) -> None:
        self.outcomes[run.index] = outcome
        self._counts.group(run)
        report: Json = {"type": "group", "group": run.index, "outcome": outcome}
        if error is not None:
            report["error"] = error
        if outcome is Outcome.SUSPENDED:
            report["open"] = {str(sample.index): len(sample.token_ids) for sample in run.open}
            self.write_growth()
        else:
            run.drop()
        if run.is_read_by_engine:
            report["prompt_token_ids"] = run.read_bytes
        self._emit(report, run.index, OF_GROUP, outcome, keeps_parts=outcome is Outcome.SUSPENDED)

    def end(self) -> None:
        """All groups have ended."""
        self.is_ended = True
        self._emit({"type": "end", "outcomes": self.outcome_counts}, OF_SUBMISSION, OF_GROUP, _ENDED)

    def _emit(self, report: Json, group: int, sample: int, mark: str, *, keeps_parts: bool = False) -> None:
        cursor = self._last = max(self._last + 1, (self.life << _LIFE_BITS) + 1)
        if self.has_outgrown:
            report["durable"] = False
        event = EventRow(cursor, group, sample, mark, msgspec.msgpack.encode({"cursor": cursor, **report}))
        self._events.append(event)
        self._event_bytes += _size(event)
        self._put(
            lambda file: file.add_event(self.number, event, keeps_parts=keeps_parts),
            partial(self._is_durable, cursor),
        )

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
                    yield [event.content for event in ready if event.content is not None]
                elif (self.is_ended and cursor >= self._last) or self.is_released:
                    return
                else:
                    await news.wait()
        finally:
            self.readers -= 1
            self.quiet_since = time.monotonic()

    def ready(self, cursor: int) -> list[EventRow]:
        """Return the first events after `cursor` that may be delivered."""
        ready, num_bytes = [], 0
        start = bisect_right(self._events, cursor, key=_cursor)
        for event in self._events[start : start + _AT_ONCE]:
            if event.cursor > self._durable or num_bytes > _BYTES_AT_ONCE:
                break
            num_bytes += len(event.content or b"")
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
        self.acked = cursor
        place = bisect_right(self._events, cursor, key=_cursor)
        freed = self._events[:place]
        del self._events[:place]
        self._event_bytes -= sum(map(_size, freed))
        self._marks += [replace(event, content=None) for event in freed]
        self._put(lambda file: file.ack(self.number, cursor), self._wake)

    def release(self) -> None:
        """Free all but the id and the cursor."""
        self.is_released = True
        self._event_bytes = self._body_bytes = 0
        self._grown.clear()
        self.runs, self._events, self._marks, self.tasks = [], [], [], {}
        self._put(lambda file: file.release(self.number), self._wake)

    def take_over(self, index: int, source: "Submission", group: int) -> None:
        """Go on with a suspended group of `source`, with the own group `index`."""
        source.outcomes[group] = TAKEN
        self.runs[index].take_over(source.runs[group])
        self._taken.append((source, group))

    def drop_suspended(self, index: int) -> None:
        """Free the tokens of a suspended group, with which nothing goes on."""
        self.outcomes[index] = Outcome.CANCELLED
        self.runs[index].drop()
        self._put(lambda file: file.give_up(self.number, index, Outcome.CANCELLED), _nothing)

    # Return

    def restore(self, row: SubmissionRow) -> None:
        """Take the events and tokens of a gateway before this one."""
        self.acked = row.acked
        self._last = self._durable = row.acked
        self._body_bytes = len(row.body)
        self.opened.set()
        for event in row.events:
            (self._marks if event.content is None else self._events).append(event)
            self._last = self._durable = event.cursor
            self._event_bytes += _size(event) if event.content is not None else 0
            self._restore_event(event)
        for group, token_ids in row.prompts.items():
            self.runs[group].read = orjson.loads(token_ids)
        for (group, sample), parts in row.parts.items():
            for part in parts:
                self.runs[group].grow(sample, part)
        if not row.body:
            self.is_released = self.is_ended = True

    def _restore_event(self, event: EventRow) -> None:
        if event.group == OF_SUBMISSION:
            self.is_ended = True
        elif event.sample == OF_GROUP:
            self.outcomes[event.group] = event.mark
        else:
            self.runs[event.group].restore_end(event.sample, is_good=event.mark == _GOOD)


def _size(event: EventRow) -> int:
    """Bytes that an event takes in memory."""
    return len(event.content or b"") + _OBJECT_BYTES


def _cursor(event: EventRow) -> int:
    return event.cursor


def _grow(number: int, group: int, index: int, part: PartRow, file: LedgerFile) -> None:
    file.grow(number, group, index, part)
