"""The state machine of a weight update of any kind. Every step is bounded and timed.

    OPEN -> RECEIVING -> VERIFYING -> COMMITTED     all replicas in one turn
       |        |            |
       |        +------------+------> ABORTED
       |                     |
       +-> ROLLING ----------+------> COMMITTED     turn after turn, each loaded and verified

`flat_update.py`, `relay_update.py` and `store_update.py` are the kinds, `swaps.py` has the turns; `coordinator.py`
admits their calls.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import structlog

from engines.errors import WeightUpdateConflict
from engines.types import ReplicaState
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import on_one
from gateway.weights.updates.parts import Parts
from gateway.weights.updates.record import Phase, WeightUpdate
from gateway.weights.updates.update_log import UpdateLog
from gateway.weights.verdicts import Finding

log = structlog.get_logger()


class UpdateMachine:
    """Holds the update in progress, one at a time: opens, verifies, then commits or aborts it."""

    def __init__(self, parts: Parts, updates: UpdateLog) -> None:
        self._parts = parts
        self._updates = updates
        self._update: WeightUpdate | None = None
        self._on_abort: list[Callable[[], Awaitable[None]]] = []

    @property
    def update(self) -> WeightUpdate | None:
        """The update in progress, if any."""
        return self._update

    def on_abort(self, clear_up: Callable[[], Awaitable[None]]) -> None:
        """Call `clear_up` after each abort, while replicas are restored."""
        self._on_abort.append(clear_up)

    def check_none_open(self) -> None:
        if self._update is not None:
            leased = "wait for its trainer, which lives, or abort it with DELETE /v1/weight_updates"
            remedy = leased if self._update.lease else "finish it, or call /init_weight_transfer_engine to abort it"
            since = f"update to version {self._update.version} is open since {self._update.age_s:.1f} s"
            raise WeightUpdateConflict(f"{since}: {remedy}")

    def opened(self, call: str) -> WeightUpdate:
        """Return the update in progress. Raise `WeightUpdateConflict` where there is none for `call`."""
        if self._update is None:
            why = f"/{call} without an open update, as after a restart of the gateway"
            raise WeightUpdateConflict(f"{why}: call /start_weight_update first (TRL: restart the trainer)")
        return self._update

    def register(self, update: WeightUpdate) -> None:
        """Make an update the update in progress, before it is announced to the fleet."""
        self._update = update

    def open(self, update: WeightUpdate) -> None:
        """Announce the version. The gate of a rolling update stays open."""
        self._update, update.phase = update, Phase.ROLLING if update.rolling else update.phase
        self._parts.fleet.begin(update.version, rolling=update.rolling)

    @asynccontextmanager
    async def step(self, update: WeightUpdate, name: str, *, leaving: Sequence[Replica] = ()) -> AsyncIterator[None]:
        """Time a step. A failure aborts the update, and the replicas `leaving` leave their group."""
        async with self.or_aborted(leaving):
            with update.timed(name):
                yield

    @asynccontextmanager
    async def or_aborted(self, leaving: Sequence[Replica] = ()) -> AsyncIterator[None]:
        """Abort the update where the block fails."""
        try:
            yield
        except BaseException as error:
            await self.abort(_reason(error), leaving=leaving)
            raise

    async def remember_canary(self, members: Sequence[Replica]) -> None:
        """Read the canary before an update. A paused engine cannot answer and is read at a later update."""
        if self._parts.canary.is_enabled and not self._parts.pauses.is_paused:
            await self._parts.canary.remember(members)

    async def commit(self, update: WeightUpdate, findings: Mapping[Replica, Finding]) -> None:
        """Serve the version on the replicas that passed. The first label of it is the commit, before any token of it is
        delivered: a restarted gateway goes by that. Do not cancel it."""
        passed = [replica for replica, finding in findings.items() if finding.may_serve]
        fenced = {replica: finding.reason for replica, finding in findings.items() if not finding.may_serve}
        async with self.or_aborted():
            with update.timed("label"):
                fenced |= await self._label(update, passed)
        self._parts.canary.accept()
        self._parts.catch_up.bring_back(living(fenced))
        self._parts.fleet.commit(update.label, passed, fenced, keeps_kv=update.keeps_kv)
        self._end(update, list(findings), Phase.COMMITTED)

    async def _label(self, update: WeightUpdate, passed: Sequence[Replica]) -> dict[Replica, str]:
        """Label the version as committed. Return reasons by replica where that failed; raise where it did on all."""
        timeout_s = self._parts.config.control_timeout_s
        calls = (
            on_one(one, lambda it: it.engine.label_weights(update.label, timeout_s, is_committed=True), timeout_s)
            for one in passed
        )
        ends = await asyncio.gather(*calls, return_exceptions=True)
        failed = {one: end for one, end in zip(passed, ends, strict=True) if isinstance(end, BaseException)}
        if failed and len(failed) == len(passed):
            raise next(iter(failed.values()))
        return {one: f"its weights were not labelled: {error}" for one, error in failed.items()}

    async def abort(self, reason: str, *, leaving: Sequence[Replica] = ()) -> None:
        """End the open update, if any. Overwritten replicas are restored to the fleet's version in the background.

        The replicas `leaving` also leave their transfer group.
        """
        update = self._update
        if update is None:
            return
        fleet, catch_up = self._parts.fleet, self._parts.catch_up
        overwritten = fleet.abort(update.version, reason)
        touched = living(leaving or {*overwritten, *update.receivers})
        catch_up.bring_back(touched, after=update, leaves_group=bool(leaving), is_awaited=not update.rolling)
        update.go_on()
        ahead = [replica for replica in fleet.trained_alive if replica.weight_version == update.version]
        self._end(update, [*overwritten, *ahead], Phase.ABORTED, reason)
        if update.rolling:
            catch_up.take_back(ahead, self._parts.config.rolling_width)
        try:
            for clear_up in self._on_abort:
                await clear_up()
        finally:  # also where the trainer leaves meanwhile
            await self._parts.snapshots.discard(update.draft)

    def _end(self, update: WeightUpdate, members: Sequence[Replica], phase: Phase, error: str = "") -> None:
        for replica in members:
            found = update.replicas.setdefault(replica.replica_id, {})
            found |= {"state": replica.state.value, "weight_version": replica.weight_version}
        update.end(phase, error)
        self._update = None
        self._updates.add(update)
        self._parts.pauses.end()


def _reason(error: BaseException) -> str:
    """Return the reason of an abort. A request is cancelled when its client is gone, and at the end of the gateway."""
    if isinstance(error, asyncio.CancelledError):
        return "its trainer was gone before the answer, or the gateway ends"
    return str(error) or type(error).__name__


def living(replicas: Iterable[Replica]) -> Iterable[Replica]:
    return (replica for replica in replicas if replica.state is not ReplicaState.LOST)
