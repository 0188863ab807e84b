"""One update of the fleet's weights, from its start to its commit or its abort: `Update.take` has its steps in order.

    OPEN -> RECEIVING -> VERIFYING -> COMMITTED
       |        |            |
       +--------+------------+------> ABORTED

`group.py`, `relay.py` and `store.py` are the ways by which its tensors arrive.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from engines.engine import Json
from engines.errors import DeadlineExceeded, EngineError, StoreFailed, WeightUpdateConflict, WeightUpdateFailed
from engines.store.weight_store import GROUP
from engines.types import ReplicaState
from gateway.config.schema import WeightsConfig
from gateway.fleet.brake import Holder
from gateway.fleet.concurrency import bounded, to_its_end, together
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import failures_on, is_dead, on_one
from gateway.weights.canary import Canary
from gateway.weights.catch_up import CatchUp
from gateway.weights.pauses import Pauses
from gateway.weights.snapshots import Snapshots
from gateway.weights.updates.record import Phase, UpdateLog, UpdateRecord
from gateway.weights.verdicts import UNASKED, Finding, Result

log = structlog.get_logger()

_GONE = (ReplicaState.DRAINING, ReplicaState.LOST)
_FORGET_S = 5.0
"""Longest wait until no request holds the KV of refused weights."""


@dataclass(slots=True)
class UpdateParts:
    """The parts of the gateway that every update works with, and the update that is open: one at a time."""

    config: WeightsConfig
    fleet: Fleet
    canary: Canary
    pauses: Pauses
    snapshots: Snapshots
    catch_up: CatchUp
    log: UpdateLog
    open: "Update | None" = None
    group: Json = field(default_factory=dict)
    """The record of the group that a trainer has opened last, by which the next gateway goes on with it. `place` is its
    listener, as ADDRESS:PORT."""

    async def note_group(self, *, is_over: bool = False) -> None:
        """Keep the record in the store while no update is open; none where the group is over, or would end with the
        gateway in the middle of an update."""
        try:
            await self.snapshots.note(GROUP, {} if is_over else self.group)
        except StoreFailed as error:  # only a restarted gateway reads it
            log.warning("not noted: the transfer group", error=str(error))

    def check_none_open(self) -> None:
        if self.open is not None:
            record = self.open.record
            raise WeightUpdateConflict(
                f"update to version {record.version} is open since {record.age_s:.1f} s: finish it, or call "
                "/init_weight_transfer_engine to abort it"
            )

    def opened(self, call: str) -> "Update":
        """Return the open update. Raise `WeightUpdateConflict` where there is none for `call`."""
        if self.open is None:
            why = f"/{call} without an open update, as after a restart of the gateway"
            raise WeightUpdateConflict(f"{why}: call /start_weight_update first (TRL: restart the trainer)")
        return self.open

    async def read_canary(self, replicas: Sequence[Replica]) -> None:
        """Read the canary before an update. A paused engine cannot answer and is read at a later update."""
        if self.canary.is_enabled and not self.pauses.is_paused:
            await self.canary.remember(replicas)


class Arrival:
    """The way by which the tensors of an update arrive, and get from there onto a replica: its part of each step, which
    is nothing where it defines none."""

    async def close(self, update: "Update") -> None:
        """Check that all tensors are here and right, and name the replicas that take them: `update.members`."""

    async def load(self, update: "Update", replica: Replica) -> None:
        """Have a stopped replica load the version, and label it as not committed."""

    async def after_commit(self, update: "Update") -> None:
        """Keep the version for replicas that come later."""

    async def prepare(self, update: "Update") -> None:
        """Have its members read the version ahead while they serve."""

    async def keep_copy(self, update: "Update", replicas: Sequence[Replica]) -> None:
        """Have the copy of the tensors for the store finished, if one of these makes it: the update is committed."""

    async def dropped(self, update: "Update") -> None:
        """Remove what an aborted update has left. Engines drop what they have received by themselves."""


class Update:
    """An update that is open. `record` tells about it, also afterwards.

    `receivers` are the replicas that have tensors of it beside their weights, and drop them at an abort. With
    `is_stopped` its engines are overwritten as tensors come. `folder` is its version in the store.
    """

    def __init__(
        self, parts: UpdateParts, arrival: Arrival, record: UpdateRecord, members: Sequence[Replica] = ()
    ) -> None:
        self.record = record
        self.members = members
        self.receivers: Sequence[Replica] = ()
        self.folder = ""
        self.is_stopped = False
        self.touched_at = time.monotonic()
        self._arrival = arrival
        self._parts = parts
        self._findings: dict[Replica, Finding] = {}
        self._errors: dict[Replica, WeightUpdateFailed | DeadlineExceeded] = {}
        self._were_unknown: set[Replica] = set()
        parts.open = self

    async def take(self, canary_logprobs: Sequence[float] | None) -> int:
        """Serve the version whose tensors have arrived. Return it.

        A replica's death ends nothing, as a successor catches up. Raise `WeightUpdateFailed` or `DeadlineExceeded` as
        soon as one fails that lives; all replicas are taken back then.
        """
        async with self.or_aborted():
            await self._arrival.close(self)  # no engine is touched before, unless tensors came into its weights
            self.announce()
            if not self.members:
                raise WeightUpdateFailed("no replica serves any more: see /health")
            await self._arrival.prepare(self)  # while they still serve
            await self._pause()
            await self._load()  # and generate: a paused engine answers no canary
            await self._verify(canary_logprobs)
            await to_its_end(self._commit())  # a trainer that leaves from here on calls nothing off
        return self.record.version

    def announce(self) -> None:
        """Tell the fleet the version."""
        self._parts.fleet.begin(self.record.version)

    async def _pause(self) -> None:
        """Stop the members, around their rollouts or after them, and forget what they hold."""
        if self.is_stopped:
            return
        record, config, pauses = self.record, self._parts.config, self._parts.pauses
        await self._parts.catch_up.settled(self.members, config.control_timeout_s)
        stop = pauses.stopping(record)
        if pauses.drains(record):
            with record.timed("drain"):
                await self._on_each(pauses.drained)
        with record.timed("load"):
            await self._on_each(lambda one: on_one(one, stop, config.control_timeout_s))
        for replica in self._remaining:
            if replica.state in _GONE:
                self._find(replica, Finding(Result.LOST, f"it left: {replica.reason}"))
        self.overwrite(self._remaining)

    def overwrite(self, replicas: Sequence[Replica]) -> None:
        """Forget the version of replicas that stand still: tokens until now are of it."""
        self._were_unknown |= {replica for replica in replicas if replica.weight_version is None}
        self._parts.fleet.overwrite(replicas, self.record.version)
        self.record.phase = Phase.RECEIVING

    async def _load(self) -> None:
        """Have the members load the version together, and generate."""
        config = self._parts.config

        async def load(replica: Replica) -> None:
            await self._arrival.load(self, replica)

        with self.record.timed("load"):
            await self._on_each(lambda one: on_one(one, load, config.load_timeout_s))
            await self._on_each(lambda one: on_one(one, self._release, config.control_timeout_s))
        self.record.go_on()

    async def _release(self, replica: Replica) -> None:
        """Have a replica generate with its new weights. Its tokens are delivered after the verdict."""
        await replica.brake.release(Holder.UPDATE, self._parts.config.control_timeout_s)
        if replica not in self._were_unknown:
            return
        try:  # where requests hold it that are none of ours, as on an external server, the canary finds NaN in it
            await bounded(self._parts.catch_up.forget_kv(replica), _FORGET_S, "requests hold its KV cache")
        except (EngineError, DeadlineExceeded) as error:
            log.warning("KV of refused weights is left", replica=replica.replica_id, error=str(error))

    async def _verify(self, canary_logprobs: Sequence[float] | None) -> None:
        """Find out by the canary which weights the members hold."""
        self.record.phase = Phase.VERIFYING
        replicas, canary = self._remaining, self._parts.canary
        found: Mapping[Replica, Finding] = dict.fromkeys(replicas, UNASKED)
        with self.record.timed("canary"):
            if canary.is_enabled and replicas:
                async with self._parts.pauses.answering(replicas):
                    busy = any(not replica.idle.is_set() for replica in replicas)
                    found = await canary.check(replicas, self.record.version, trainers=canary_logprobs, busy=busy)
        for replica, finding in found.items():
            self._find(replica, finding)
        self._check()

    async def _commit(self) -> None:
        """Serve the version on the replicas that passed. The first label is the commit: a restarted gateway reads it.
        No token of the version is delivered before. Do not cancel it."""
        record, findings, parts = self.record, self._findings, self._parts
        passed = [replica for replica, finding in findings.items() if finding.may_serve]
        fenced = {replica: finding.reason for replica, finding in findings.items() if not finding.may_serve}
        with record.timed("label"):
            fenced |= await self._label(passed)
        # Before a replica that failed is restored: it may have the copy for the store.
        await self._arrival.keep_copy(self, [one for one in findings if findings[one].result is not Result.LOST])
        parts.canary.accept()
        parts.catch_up.bring_back(living(fenced))
        parts.fleet.commit(record.label, passed, fenced, keeps_kv=record.keeps_kv)
        self._end(findings, Phase.COMMITTED)
        await self._arrival.after_commit(self)

    async def _label(self, passed: Sequence[Replica]) -> dict[Replica, str]:
        """Label the version as committed. Return reasons by replica where that failed; raise where it did on all."""
        label, timeout_s = self.record.label, self._parts.config.control_timeout_s
        failed = await failures_on(
            passed, lambda one: one.engine.label_weights(label, timeout_s, is_committed=True), timeout_s
        )
        if failed and len(failed) == len(passed):
            raise next(iter(failed.values()))
        return {one: f"its weights were not labelled: {error}" for one, error in failed.items()}

    async def abort(self, reason: str, *, leaving: Sequence[Replica] = ()) -> None:
        """End the update, unless it has ended. Overwritten replicas are taken back in the background, and the replicas
        `leaving` also leave their transfer group. A caller that is cancelled waits for the end of that."""
        if self.record.ended_at is None:
            await to_its_end(self._abort(reason, leaving))

    async def _abort(self, reason: str, leaving: Sequence[Replica]) -> None:
        record, fleet, catch_up = self.record, self._parts.fleet, self._parts.catch_up
        overwritten = fleet.abort(record.version, reason)
        touched = living(leaving or {*overwritten, *self.receivers})
        catch_up.bring_back(touched, leaves_group=bool(leaving))
        record.go_on()
        self._end(overwritten, Phase.ABORTED, reason)
        await self._arrival.dropped(self)
        await self._parts.snapshots.discard(record.draft)

    def _end(self, members: Iterable[Replica], phase: Phase, error: str = "") -> None:
        for replica in members:
            found = self.record.replicas.setdefault(replica.replica_id, {})
            found |= {"state": replica.state.value, "weight_version": replica.weight_version}
        self.record.end(phase, error)
        self._parts.open = None
        self._parts.log.add(self.record)
        self._parts.pauses.end()

    @asynccontextmanager
    async def or_aborted(self) -> AsyncIterator[None]:
        """Abort the update where the block fails."""
        try:
            yield
        except BaseException as error:
            await self.abort(reason_of(error))
            raise

    @property
    def _remaining(self) -> Sequence[Replica]:
        """The members that have not failed."""
        return [replica for replica in self.members if replica not in self._findings]

    async def _on_each(self, call: Callable[[Replica], Awaitable[None]]) -> None:
        """Make a bounded call on all members that are left, at the same time. A failure is a finding."""

        async def attempt(replica: Replica) -> None:
            try:
                await call(replica)
            except (WeightUpdateFailed, DeadlineExceeded) as error:
                died = isinstance(error, WeightUpdateFailed) and await is_dead(replica)
                self._errors[replica] = error
                self._find(replica, Finding(Result.LOST if died else Result.FAILED, str(error)))
                self._check()

        await together(map(attempt, self._remaining))

    def _find(self, replica: Replica, finding: Finding) -> None:
        self._findings[replica] = finding
        self.record.replicas[replica.replica_id] = {"canary": finding.report()}

    def _check(self) -> None:
        """Raise where a replica that lives has failed, or none is left."""
        failed = [one for one, finding in self._findings.items() if finding.result is Result.FAILED]
        passed = [one for one, finding in self._findings.items() if finding.may_serve]
        if not failed and (passed or self._remaining):
            return
        culprit = next(iter(failed or self._findings))
        if culprit in self._errors:
            raise self._errors[culprit]
        raise WeightUpdateFailed(
            f"{len(self._findings) - len(passed)} of {len(self._findings)} replicas failed to take version "
            f"{self.record.version}; replica {culprit.replica_id}: {self._findings[culprit].reason}; {len(passed)} "
            "replicas had taken the version and are restored",
            replica_id=culprit.replica_id,
        )


def reason_of(error: BaseException) -> str:
    """Return the reason of an abort. A request is cancelled when its client is gone, and at the end of the gateway."""
    if isinstance(error, asyncio.CancelledError):
        return "its trainer was gone before the answer, or the gateway ends"
    return str(error) or type(error).__name__


def living(replicas: Iterable[Replica]) -> Iterable[Replica]:
    return (replica for replica in replicas if replica.state is not ReplicaState.LOST)
