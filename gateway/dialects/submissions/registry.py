"""All submissions of a gateway: joins equal ones, runs their groups, keeps bounds, and brings them over a restart."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain

import msgspec
import orjson
import structlog

from engines.engine import Json
from engines.errors import (
    IdTaken,
    InvalidRequest,
    RolloutGatewayError,
    TooManyRequests,
    UnknownRequest,
)
from gateway.api import GONE, body_of, error_body
from gateway.config.schema import SubmissionsConfig
from gateway.dialects.completions import Completions
from gateway.dialects.runner import Runner
from gateway.dialects.submissions.frames import Head, read_head, read_steps
from gateway.dialects.submissions.group_run import GroupRun, Outcome, decoded
from gateway.dialects.submissions.submission import Counts, Submission
from gateway.dialects.submissions.words import Group
from gateway.fleet.concurrency import in_turns
from gateway.ledger.folder import Left
from gateway.ledger.ledger import Ledger, Record

log = structlog.get_logger()

_BOUNDS_S = 1.0
_RELEASED_KEPT = 10_000
_CHECKED_AT_ONCE = 100  # groups, before others get their turn on the loop
_ENDED_AT_ONCE = _BEGUN_AT_ONCE = 20
_CANCELLED_WITHIN_S = 5.0
_FULL_RETRY_S = 10.0
_MAX_AGE_S = 86_400.0
_ABANDONED_AFTER_S = 600.0
"""Longest time in which no client reads the events of a submission before its groups are cancelled."""
_UNFORESEEN = error_body("the gateway failed; its log has the reason", 500)["error"]


KIND = "submission"


class Submissions:
    """The submissions, by owner and id."""

    kind = KIND

    def __init__(
        self,
        config: SubmissionsConfig,
        completions: Completions,
        runner: Runner,
        ledger: Ledger,
        counts: Counts,
    ) -> None:
        self._config = config
        self._completions, self._runner = completions, runner
        self._ledger = ledger
        ledger.add(self)
        self._counts = counts
        self._kept: dict[tuple[str, str], Submission] = {}
        self._running: set[Submission] = set()

    def report(self) -> Json:
        """The state for /status."""
        kept = self._kept.values()
        return self._ledger.report() | {
            "submissions": sum(not one.is_released for one in kept),
            "open": sum(not one.is_ended for one in kept),
            "kept_bytes": sum(one.num_bytes for one in kept),
        }

    @property
    def is_durable(self) -> bool:
        """True if events outlive the gateway."""
        return self._ledger.is_durable

    # Clients

    async def submit(self, owner: str, name: str, groups: Sequence[Group]) -> Submission:
        """Begin a submission, or join the one of this id. Return it once it is durable."""
        digest = _digest(groups)
        submission = self._kept.get((owner, name))
        if submission is None:
            ranks = await self._checked(owner, name, groups)
            submission = self._kept.get((owner, name))  # another client may have begun it meanwhile
        if submission is None:
            submission = self._begin(Head(owner, name, digest, time.time()), groups)
            for run, rank in zip(submission.runs, ranks, strict=True):
                run.rank = rank
        elif submission.head.digest != digest:
            raise IdTaken(f"id = {name!r} is that of a submission with other groups: choose another id", param="id")
        await submission.opened.wait()
        return submission

    def find(self, owner: str, name: str) -> Submission:
        """Return a submission. Raise `UnknownRequest`."""
        found = self._kept.get((owner, name))
        if found is None:
            raise UnknownRequest(
                f"no submission {name!r} of this key: it never arrived, was acked long ago, or was forgotten (see "
                "gateway.submissions and gateway.ledger)",
                param="id",
            )
        return found

    async def ack(self, submission: Submission, cursor: int) -> None:
        """Free events, and the submission where all are acked. Return once that is durable."""
        submission.ack(cursor)
        self._release_if_done(submission)
        await self._ledger.written()

    async def cancel(self, submission: Submission, groups: Iterable[int] | None, reason: str) -> None:
        """End groups that run, all unless named. Return once that is durable, so that no later gateway runs them."""
        await self._ended(submission, await self._stop(submission, groups, reason))
        self._release_if_done(submission)

    async def let_deadline_pass(self, submission: Submission, groups: Iterable[int] | None) -> None:
        """End groups that run, all unless named, as their deadline would. Return once that is durable."""
        await self._ended(submission, await self._stop(submission, groups, ""))

    async def _stop(self, submission: Submission, groups: Iterable[int] | None, reason: str) -> list[GroupRun]:
        running = submission.running(groups)
        async for run in in_turns(running, _ENDED_AT_ONCE):
            if run.stopped is None:
                run.stopped = reason
            if run.task:
                run.task.cancel()
        return running

    async def _ended(self, submission: Submission, runs: Sequence[GroupRun]) -> None:
        """Return once these have ended, and the ledger has all of it; at the latest after a few seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CANCELLED_WITHIN_S):
                await submission.groups_ended([run.index for run in runs])
                await self._ledger.written()

    # Life

    async def run(self) -> None:
        """Keep bounds."""
        while True:
            await asyncio.sleep(_BOUNDS_S)
            await self._keep_bounds()

    async def close(self) -> None:
        """Stop all groups, which a later gateway goes on with."""
        tasks = [submission.task for submission in self._kept.values() if submission.task]
        for submission in self._kept.values():
            submission.record.write_growth()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _checked(self, owner: str, name: str, groups: Sequence[Group]) -> list[float]:
        """Return the groups' ranks by length. Raise `InvalidRequest` before any of them runs."""
        await self._refuse_if_full(owner)
        ranks = []
        async for index, group in in_turns(enumerate(groups), _CHECKED_AT_ONCE):
            ranks.append(decoded(self._completions, group, index, owner, name).rollout.rank)
        return ranks

    def _begin(self, head: Head, groups: Sequence[Group]) -> Submission:
        submission = self._made(head, groups, Record.new(self._ledger, KIND))
        submission.task = asyncio.create_task(self._live(submission, is_new=True), name=f"submission {head.id}")
        return submission

    def _made(self, head: Head, groups: Sequence[Group], record: Record) -> Submission:
        submission = Submission(head, groups, record, self._counts, self._ledger.life)
        self._kept[head.owner, head.id] = submission
        return submission

    async def _live(self, submission: Submission, *, is_new: bool) -> None:
        """Run all groups. Clients that read get an end, also where the gateway fails."""
        self._running.add(submission)
        try:
            await self._run_groups(submission, is_new=is_new)
        except Exception:
            log.exception("a submission failed in a way that was not foreseen", id=submission.id)
            submission.opened.set()
            for run in submission.running(None):
                submission.end_group(run, Outcome.FAILED, _UNFORESEEN)
        finally:
            self._running.discard(submission)
        submission.end()

    async def _run_groups(self, submission: Submission, *, is_new: bool) -> None:
        if is_new:
            submission.write(msgspec.json.encode([run.group for run in submission.runs]))
            await submission.opened.wait()
        age_s = max(0.0, time.time() - submission.head.began)
        async with asyncio.TaskGroup() as group:
            async for run in in_turns(sorted(submission.running(None), key=lambda run: run.rank), _BEGUN_AT_ONCE):
                work = self._run_group(submission, run, age_s)
                run.task = group.create_task(work, name=f"{submission.id}-{run.index}")
        for run in submission.running(None):  # stopped before its task took its first step
            self._end_stopped(submission, run)

    async def _run_group(self, submission: Submission, run: GroupRun, age_s: float) -> None:
        deadline_s = run.group.deadline_s
        left_s = None if deadline_s is None else max(0.0, deadline_s - age_s)
        try:
            if run.stopped is not None:
                raise asyncio.CancelledError
            submission.end_group(run, await run.run(self._completions, self._runner, left_s))
        except asyncio.CancelledError:
            if run.stopped is None:
                raise  # the gateway stops
            self._end_stopped(submission, run)
        except RolloutGatewayError as error:
            submission.end_group(run, Outcome.FAILED, body_of(error).get("error") or body_of(error))
        except Exception:
            log.exception("a group failed in a way that was not foreseen", submission=submission.id, group=run.index)
            submission.end_group(run, Outcome.FAILED, _UNFORESEEN)

    def _end_stopped(self, submission: Submission, run: GroupRun) -> None:
        if run.stopped:
            submission.end_group(run, Outcome.CANCELLED, error_body(run.stopped, GONE)["error"])
        else:
            submission.end_group(run, run.at_deadline())

    # Bounds

    async def _refuse_if_full(self, owner: str) -> None:
        """Refuse a new submission while the owner's others leave no room."""
        if self._over_bytes(owner) > 0:
            await self._keep_bounds()
        if (over := self._over_bytes(owner)) > 0:
            raise TooManyRequests(
                f"submissions of this key that have not ended fill gateway.submissions.max_bytes = "
                f"{self._config.max_bytes} ({over} bytes too many): ack what was delivered, or raise it",
                _FULL_RETRY_S,
            )

    def _over_bytes(self, owner: str) -> int:
        """Bytes beyond the bound, which each owner has for itself."""
        return self._bytes_by_owner()[owner] - self._config.max_bytes

    def _bytes_by_owner(self) -> Counter[str]:
        sizes = Counter[str]()
        for submission in self._kept.values():
            sizes[submission.owner] += submission.num_bytes
        return sizes

    async def _keep_bounds(self) -> None:
        now, clock = time.time(), time.monotonic()
        for submission in list(self._kept.values()):
            is_old = now - submission.head.began > _MAX_AGE_S
            quiet_s = 0.0 if submission.readers else clock - submission.quiet_since
            if submission.is_ended and is_old:
                self._forget(submission, f"older than {_MAX_AGE_S:g} s")
            elif is_old:
                await self._stop(submission, None, f"older than {_MAX_AGE_S:g} s")
            elif not submission.is_ended and quiet_s > _ABANDONED_AFTER_S:
                await self._stop(submission, None, f"nobody has read its events for {_ABANDONED_AFTER_S:g} s")
        for owner, size in self._bytes_by_owner().items():
            if size > self._config.max_bytes:
                self._forget_oldest(owner, size - self._config.max_bytes)
        released = sorted((one for one in self._kept.values() if one.is_released), key=_age)
        for submission in released[_RELEASED_KEPT:]:
            self._forget(submission)

    def _forget_oldest(self, owner: str, over: int) -> None:
        ended = [one for one in self._kept.values() if one.owner == owner and one.is_ended and not one.is_released]
        for submission in sorted(ended, key=_age, reverse=True):
            if over <= 0:
                return
            over -= submission.num_bytes
            self._forget(submission, f"gateway.submissions.max_bytes = {self._config.max_bytes}")

    def _forget(self, submission: Submission, reason: str = "") -> None:
        if reason:
            log.warning("a submission is forgotten that was not acked", id=submission.id, reason=reason)
        if self._kept.pop((submission.owner, submission.id), None):
            submission.record.remove()
            submission.release()

    def _release_if_done(self, submission: Submission) -> None:
        if submission.is_acked and not submission.is_released:
            submission.release()

    # Ledger

    def bring_back(self, left: Sequence[Left]) -> None:
        for one in left:
            record = Record(self._ledger, one.name)
            try:
                self._restore(record, read_head(one.frames[0]), one.frames[1:])
            except (ValueError, KeyError, TypeError, IndexError) as error:
                log.error("a submission in the ledger cannot be read", record=one.name, error=repr(error))
                record.remove()
        for submission in self._kept.values():
            if not submission.is_ended:
                work = self._live(submission, is_new=False)
                submission.task = asyncio.create_task(work, name=f"submission {submission.id}")

    def _restore(self, record: Record, head: Head, frames: Sequence[bytes]) -> None:
        groups = msgspec.json.decode(head.groups or b"[]", type=list[Group])
        submission = self._made(head, groups, record)
        try:
            submission.restore(chain.from_iterable(map(read_steps, frames)))
        except BaseException:
            del self._kept[head.owner, head.id]
            raise


def _age(submission: Submission) -> float:
    return -submission.head.began


def _digest(groups: Sequence[Group]) -> bytes:
    try:
        fields = msgspec.to_builtins(groups, builtin_types=(bytes,))
        content = orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise InvalidRequest(f"groups has a value that JSON does not have: {error}", param="groups") from error
    return hashlib.blake2b(content, digest_size=16).digest()
