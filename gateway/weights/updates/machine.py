"""The state machine of a weight update of any kind. Every step is bounded and timed.

    OPEN -> RECEIVING -> VERIFYING -> COMMITTED     all replicas at once
       |        |            |
       |        +------------+------> ABORTED
       |                     |
       +-> ROLLING ----------+------> COMMITTED     replica after replica, each loaded and verified in its turn

`flat_update.py`, `relay_update.py` and `store_update.py` are the kinds; `coordinator.py` admits their calls.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import structlog

from engines.errors import WeightUpdateConflict, WeightUpdateFailed
from engines.types import InFlight, ReplicaState
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import on_living
from gateway.weights.updates.parts import Parts
from gateway.weights.updates.record import Phase, WeightUpdate
from gateway.weights.updates.update_log import UpdateLog
from gateway.weights.verdicts import Finding, ended_by

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
            raise WeightUpdateConflict(
                f"update to version {self._update.version} is open since {self._update.age_s:.1f} s: finish it, or "
                "call /init_weight_transfer_engine to abort it"
            )

    def opened(self, call: str) -> WeightUpdate:
        """Return the update in progress. Raise `WeightUpdateConflict` where there is none for `call`."""
        if self._update is None:
            raise WeightUpdateConflict(f"/{call} without an open update: call /start_weight_update first")
        return self._update

    def register(self, update: WeightUpdate) -> None:
        """Make an update the update in progress, before it is announced to the fleet."""
        self._update = update

    def open(self, update: WeightUpdate) -> None:
        """Announce the version."""
        self._update = update
        self._parts.fleet.begin(update.version)

    def open_rolling(self, update: WeightUpdate) -> None:
        """Announce a rolling update; the gate stays open."""
        self._update, update.phase = update, Phase.ROLLING
        self._parts.fleet.begin(update.version, rolling=True)

    @asynccontextmanager
    async def step(self, update: WeightUpdate, name: str, *, leaving: Sequence[Replica] = ()) -> AsyncIterator[None]:
        """Time a step. A failure aborts the update, and the replicas `leaving` leave their group."""
        try:
            with update.timed(name):
                yield
        except BaseException as error:
            await self.abort(str(error) or type(error).__name__, leaving=leaving)
            raise

    async def drain(self, update: WeightUpdate) -> None:
        """With `in_flight: drain`, close the gate and wait for rollouts in flight, once."""
        # A paused engine makes no tokens, so a wait would not end; the pause decided about rollouts in flight.
        if update.in_flight is InFlight.DRAIN and not (update.overwrites or self._parts.pauses.is_paused):
            async with self.step(update, "drain"):
                await self._parts.pauses.drain()

    async def overwrite(self, update: WeightUpdate, members: Sequence[Replica]) -> None:
        """Freeze the engines and forget their versions, until the commit."""
        await self._parts.catch_up.settled(members, self._parts.config.control_timeout_s)
        await self._parts.pauses.freeze(update, members)
        update.phase, update.overwrites = Phase.RECEIVING, True
        self._parts.fleet.overwrite(members, update.version)
        await self._parts.snapshots.note_overwritten(members)

    async def take(
        self,
        update: WeightUpdate,
        members: Sequence[Replica],
        load: Callable[[Replica], Awaitable[None]],
        canary_logprobs: Sequence[float] | None,
    ) -> tuple[tuple[Replica, ...], dict[Replica, Finding]]:
        """Have these replicas load the version together, generate, and answer the canary. They are stopped for it,
        unless they are overwritten already.

        Return those that hold it then, and their findings: a death delays no other replica.
        """
        await self.drain(update)
        async with self.step(update, "load"):
            if not update.overwrites:
                await self.overwrite(update, members)
            living = await on_living(members, load, self._parts.config.load_timeout_s)
            await self._parts.pauses.thaw(update)
        update.phase = Phase.VERIFYING
        async with self.step(update, "canary"):
            return living, await self.verify(update, living, canary_logprobs)

    async def remember_canary(self, members: Sequence[Replica]) -> None:
        """Read the canary before an update. A paused engine cannot answer and is read at a later update."""
        if self._parts.canary.is_enabled and not self._parts.pauses.is_paused:
            await self._parts.canary.remember(members)

    async def verify(
        self, update: WeightUpdate, members: Sequence[Replica], canary_logprobs: Sequence[float] | None
    ) -> dict[Replica, Finding]:
        """Return the canary findings of all members. Raise `WeightUpdateFailed` if weights.must_pass ends it."""
        if not self._parts.canary.is_enabled:
            return {}
        async with self._parts.pauses.answering(members):
            findings = await self._parts.canary.check(
                members,
                update.version,
                trainers=canary_logprobs,
                busy=any(not replica.idle.is_set() for replica in members),
            )
        for replica, finding in findings.items():
            update.replicas[replica.replica_id] = {"canary": finding.report()}
        if (culprit := ended_by(self._parts.config, findings)) is not None:
            failed = sum(not finding.may_serve for finding in findings.values())
            raise WeightUpdateFailed(
                f"{failed} of {len(findings)} replicas failed the canary (weights.must_pass: "
                f"{self._parts.config.must_pass}); replica {culprit.replica_id}: {findings[culprit].reason}",
                replica_id=culprit.replica_id,
            )
        return findings

    async def commit(self, update: WeightUpdate, members: Sequence[Replica], findings: dict[Replica, Finding]) -> None:
        """Serve the version on the members that passed. The holders are noted first, for a restarted gateway."""
        fenced = {replica: finding.reason for replica, finding in findings.items() if not finding.may_serve}
        try:
            passed = [replica for replica in members if replica not in fenced]
            await self._parts.snapshots.note_holders(update.version, passed)
        except BaseException as error:
            await self.abort(str(error) or type(error).__name__)
            raise
        self._parts.canary.accept()
        self._parts.fleet.commit(update.version, members, fenced, keeps_kv=update.keeps_kv)
        self._end(update, members, Phase.COMMITTED)

    async def abort(self, reason: str, *, leaving: Sequence[Replica] = ()) -> None:
        """End the open update, if any. Overwritten replicas are restored to the fleet's version in the background.

        The replicas `leaving` also leave their transfer group.
        """
        update = self._update
        if update is None:
            return
        fleet, catch_up = self._parts.fleet, self._parts.catch_up
        overwritten = fleet.abort(update.version, reason)
        catch_up.restore(_living(leaving or overwritten or update.receivers), leaves_group=bool(leaving))
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


def _living(replicas: Sequence[Replica]) -> Iterable[Replica]:
    return (replica for replica in replicas if replica.state is not ReplicaState.LOST)
