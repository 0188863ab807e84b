"""Updates from a draft in the weight store, which all replicas load together."""

from collections.abc import Sequence

from engines.announcement import check_tensors
from engines.engine import Json
from engines.errors import WeightUpdateConflict
from engines.types import InFlight
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import names, try_on_all
from gateway.weights.updates.record import UpdateRecord
from gateway.weights.updates.update import Arrival, Update, UpdateParts


class StoreArrival(Arrival):
    """Has the fleet load a draft that a trainer, or the relay, has written."""

    def __init__(self, parts: UpdateParts) -> None:
        self._parts = parts

    async def push(
        self,
        draft: str,
        version: int | None,
        canary_logprobs: Sequence[float] | None,
        in_flight: InFlight | None,
    ) -> int:
        """Serve the draft of this name, which a trainer has written. Return its version."""
        parts, fleet = self._parts, self._parts.fleet
        parts.check_none_open()
        members = await self.loaders()
        if version is not None and version < fleet.next_version:
            raise WeightUpdateConflict(
                f"version = {version}, but the fleet is at {fleet.version}, the next is {fleet.next_version}, and "
                "versions only grow: leave it out"
            )
        parts.canary.check_length(canary_logprobs, members)
        announced = await parts.snapshots.announced(draft)
        await self._check_fits(announced, members)
        record = UpdateRecord(version or fleet.next_version, "store", in_flight or parts.config.in_flight)
        record.draft = parts.snapshots.folder / draft
        record.receive(announced)
        return await Update(parts, self, record, members).take(canary_logprobs)

    async def loaders(self) -> list[Replica]:
        """Return the replicas that load from the store. Raise `WeightUpdateConflict` where there are none."""
        fleet, timeout_s = self._parts.fleet, self._parts.config.control_timeout_s
        await fleet.settled_within(timeout_s)
        able = [replica for replica in fleet.updatable() if replica.info.loads_snapshots]
        if not able:
            there = names(fleet.updatable()) or "none, see /health"
            raise WeightUpdateConflict(f"no replica can load weights from a folder; replicas: {there}")
        return await self._parts.catch_up.available(able, timeout_s)

    async def close(self, update: Update) -> None:
        """Make the draft a version of the store."""
        snapshots, record = self._parts.snapshots, update.record
        assert record.draft is not None
        tensors = {tensor.name for replica in update.members for tensor in replica.info.tensors or ()}
        try:
            with record.timed("prepare"):
                folder = await snapshots.promote(record.draft, record.label, self._parts.fleet.version, tensors)
        except BaseException:  # a cancelled call may have made it a version
            await snapshots.withdraw(record.version)
            raise
        update.folder = str(folder)

    async def prepare(self, update: Update) -> None:
        update.receivers = update.members
        version, timeout_s = update.record.version, self._parts.config.load_timeout_s
        with update.record.timed("prepare"):
            await try_on_all(
                update.members,
                lambda replica: replica.engine.prepare_snapshot(update.folder, version, timeout_s),
                timeout_s,
                "not read ahead, so it loads longer",
            )

    async def load(self, update: Update, replica: Replica) -> None:
        timeout_s = self._parts.config.load_timeout_s
        await replica.engine.load_snapshot(update.folder, update.record.version, timeout_s)
        await replica.engine.label_weights(update.record.label, timeout_s, is_committed=False)

    async def after_commit(self, update: Update) -> None:
        await self._parts.snapshots.settle(update.record.version)

    async def dropped(self, update: Update) -> None:
        if update.folder:
            await self._parts.snapshots.withdraw(update.record.version)

    async def _check_fits(self, announced: Json, members: Sequence[Replica]) -> None:
        """Raise where tensors do not fit the model. Read the canary before replicas load."""
        for replica in members:
            check_tensors(announced, replica.info, "snapshot")
        await self._parts.read_canary(members)
