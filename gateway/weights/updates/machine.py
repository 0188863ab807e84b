"""The state machine of a weight update, whichever way its tensors come. Every step is bounded, and timed.

    OPEN -> RECEIVING -> VERIFYING -> COMMITTED | ABORTED

The ways are `flat_update.py`, `relay_update.py` and `store_update.py`; whose turn it is says `weights.py`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import structlog

from engines.errors import WeightUpdateConflict, WeightUpdateFailed
from engines.types import InFlight, ReplicaState
from gateway.config.schema import WeightsConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.weights.canary import Canary
from gateway.weights.catch_up import CatchUp
from gateway.weights.freeze import Generation, policy
from gateway.weights.snapshots import Snapshots
from gateway.weights.updates.quorum import ended_by
from gateway.weights.updates.record import Phase, WeightUpdate
from gateway.weights.updates.update_log import UpdateLog
from gateway.weights.verdicts import Finding

log = structlog.get_logger()


class UpdateMachine:
    """Holds the update in progress, one at a time: opens, verifies, then commits or aborts it."""

    def __init__(
        self,
        config: WeightsConfig,
        fleet: Fleet,
        canary: Canary,
        generation: Generation,
        snapshots: Snapshots,
        catch_up: CatchUp,
        updates: UpdateLog,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._canary = canary
        self._generation = generation
        self._snapshots = snapshots
        self._catch_up = catch_up
        self._updates = updates
        self._update: WeightUpdate | None = None
        self._on_abort: list[Callable[[], Awaitable[None]]] = []

    @property
    def update(self) -> WeightUpdate | None:
        """The update in progress, if any."""
        return self._update

    def on_abort(self, clear_up: Callable[[], Awaitable[None]]) -> None:
        """Call `clear_up` when an update is aborted, once replicas are being brought back."""
        self._on_abort.append(clear_up)

    def check_none_open(self) -> None:
        if self._update is not None:
            raise WeightUpdateConflict(
                f"update to version {self._update.version} is open since {self._update.age_s:.1f} s: finish it, or "
                "call /init_weight_transfer_engine to abort it"
            )

    def opened(self, call: str) -> WeightUpdate:
        """The update in progress, which `call` is about."""
        if self._update is None:
            raise WeightUpdateConflict(f"/{call} without an open update: call /start_weight_update first")
        return self._update

    def register(self, update: WeightUpdate) -> None:
        """An update has been announced to us, and not to the fleet yet."""
        self._update = update

    async def open(self, update: WeightUpdate) -> None:
        """Announce the version; where rollouts in flight are to finish first, close the gate and wait for them."""
        self._update = update
        self._fleet.begin(update.version)
        # A paused engine makes no tokens, so there is nothing to wait for: the trainer chose what becomes of rollouts
        # in flight when it chose the mode of the pause.
        if update.in_flight is InFlight.DRAIN and not self._generation.is_paused:
            async with self.step(update, "drain"):
                await self._generation.drain()

    def open_rolling(self, update: WeightUpdate) -> None:
        """Announce a version that replicas take one after the other, while the gate stays open."""
        self._update, update.phase = update, Phase.ROLLING
        self._fleet.begin(update.version, rolling=True)

    @asynccontextmanager
    async def step(self, update: WeightUpdate, name: str, *, leaving: Sequence[Replica] = ()) -> AsyncIterator[None]:
        """A step of the update, timed. Where it fails the update is aborted, and `leaving` leave their group."""
        try:
            with update.timed(name):
                yield
        except BaseException as error:
            await self.abort(str(error) or type(error).__name__, leaving=leaving)
            raise

    async def overwrite(self, update: WeightUpdate, members: Sequence[Replica]) -> None:
        """From here on engines are overwritten: none of them counts as holding any version until the commit."""
        await self._catch_up.settled(self._config.control_timeout_s)
        await self._generation.freeze(update, members)
        update.phase = Phase.RECEIVING
        for replica in members:
            if replica.state is ReplicaState.LOST:
                continue  # whoever calls it next finds out
            replica.weight_version = None
            self._fleet.set_state(replica, ReplicaState.UPDATING, f"update to version {update.version}")
        await self._snapshots.note_overwritten(members)

    async def remember_canary(self, members: Sequence[Replica]) -> None:
        """What the canary says before the first update. A paused engine answers nothing, and is asked another time."""
        if self._canary.is_enabled and not self._generation.is_paused:
            await self._canary.remember(members)

    async def verify(
        self, update: WeightUpdate, members: Sequence[Replica], canary_logprobs: Sequence[float] | None
    ) -> dict[Replica, Finding]:
        """Canary findings of all members. Raises `WeightUpdateFailed` where too many fail for the policy."""
        if not self._canary.is_enabled:
            return {}
        async with self._generation.answering(members):
            findings = await self._canary.check(
                members,
                update.version,
                trainers=canary_logprobs,
                busy=any(not replica.idle.is_set() for replica in members),
            )
        for replica, finding in findings.items():
            update.replicas[replica.replica_id] = {"canary": finding.report()}
        if (culprit := ended_by(self._config, findings)) is not None:
            failed = sum(not finding.may_serve for finding in findings.values())
            raise WeightUpdateFailed(
                f"{failed} of {len(findings)} replicas failed the canary (weights.policy: {self._config.policy}); "
                f"replica {culprit.replica_id}: {findings[culprit].reason}",
                replica_id=culprit.replica_id,
            )
        return findings

    def commit(self, update: WeightUpdate, members: Sequence[Replica], findings: dict[Replica, Finding]) -> None:
        self._canary.accept()
        self._fleet.version, self._fleet.rolling_to = update.version, None
        fenced = {replica: finding for replica, finding in findings.items() if not finding.may_serve}
        for replica in members:
            if replica not in fenced:
                replica.hold(update.version, keeps_kv=update.keeps_kv)
        for replica, finding in fenced.items():
            self._fleet.fence(replica, f"fenced at version {update.version}: {finding.reason}")
        for replica in policy(self._fleet):
            if replica not in fenced:
                self._fleet.settle(replica, f"version {update.version} committed")
        self._end(update, members, Phase.COMMITTED)

    def holders(self, version: int) -> list[Replica]:
        return [replica for replica in self._fleet.policy if replica.weight_version == version]

    async def abort(self, reason: str, *, leaving: Sequence[Replica] = ()) -> None:
        """End the open update, if any. Replicas that were being overwritten hold no known version and do not serve
        until they are back at the fleet's, which happens beside this; `leaving` also leave their transfer group."""
        update = self._update
        if update is None:
            return
        updating = [replica for replica in policy(self._fleet) if replica.state is ReplicaState.UPDATING]
        overwritten = [replica for replica in updating if replica.weight_version is None]
        for replica in overwritten:
            self._fleet.fence(replica, f"update to version {update.version} aborted: {reason}")
        update.go_on()
        ahead = [replica for replica in policy(self._fleet) if replica.weight_version == update.version]
        self._end(update, [*overwritten, *ahead], Phase.ABORTED, reason)
        self._catch_up.restore(_living(leaving or overwritten), leaves_group=bool(leaving))
        if update.rolling:
            self._catch_up.take_back(ahead, self._config.rolling_width)
            for replica in updating:
                self._fleet.settle(replica, f"serves on: the update to version {update.version} was aborted")
        for clear_up in self._on_abort:
            await clear_up()
        await self._generation.thaw_untouched()
        await self._snapshots.discard(update.draft)

    def _end(self, update: WeightUpdate, members: Sequence[Replica], phase: Phase, error: str = "") -> None:
        for replica in members:
            found = update.replicas.setdefault(replica.replica_id, {})
            found |= {"state": replica.state.value, "weight_version": replica.weight_version}
        update.end(phase, error)
        self._update = self._fleet.update_to = None
        self._updates.add(update)
        self._generation.end()


def _living(replicas: Sequence[Replica]) -> Iterable[Replica]:
    return (replica for replica in replicas if replica.state is not ReplicaState.LOST)
