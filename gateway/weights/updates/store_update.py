"""Updates from a draft in the weight store: all replicas load it together, or one after the other."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from engines.announcement import check_tensors
from engines.engine import Json
from engines.errors import WeightUpdateConflict
from engines.types import InFlight
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import names, prepare_all
from gateway.fleet.together import to_its_end
from gateway.weights.updates.machine import UpdateMachine
from gateway.weights.updates.parts import Parts
from gateway.weights.updates.record import Phase, WeightUpdate
from gateway.weights.updates.swaps import Swaps
from gateway.weights.verdicts import Finding


class StoreUpdate:
    """Loads drafts of the store on the fleet, written by a trainer or by the relay."""

    def __init__(self, parts: Parts, machine: UpdateMachine) -> None:
        self._parts = parts
        self._machine = machine

    async def load(
        self,
        snapshot: str,
        version: int | None,
        canary_logprobs: Sequence[float] | None,
        *,
        rolling: bool | None,
        in_flight: InFlight | None,
    ) -> int:
        """Load the draft that a trainer wrote on all replicas. Return its version once they serve it."""
        self._machine.check_none_open()
        members = await self.loaders()
        rolling = self._parts.config.rolling if rolling is None else rolling
        in_flight = self._parts.pauses.in_flight(members, in_flight)
        update = WeightUpdate(self._next_version(version), "store", in_flight, rolling=rolling)
        self._parts.canary.check_length(canary_logprobs, members)
        update.canary_logprobs = canary_logprobs
        announced = await self._parts.snapshots.announced(snapshot, self._parts.fleet.version)
        update.receive(announced)
        await self.check_fits(announced, members)
        await self.take(update, members, snapshot)
        return update.version

    async def loaders(self) -> tuple[Replica, ...]:
        """Return the replicas that load from the store. Raise `WeightUpdateConflict` if there are none."""
        await self._parts.fleet.settled_within(self._parts.config.control_timeout_s)
        able = [replica for replica in self._parts.fleet.updatable() if replica.info.loads_snapshots]
        if not able:
            there = names(self._parts.fleet.updatable()) or "none, see /health"
            raise WeightUpdateConflict(f"no replica can load weights from a folder; replicas: {there}")
        return tuple(await self._parts.catch_up.available(able, self._parts.config.control_timeout_s))

    async def check_fits(self, announced: Json, members: Sequence[Replica]) -> None:
        """Raise where a draft's tensors do not fit the model, and read the canary before replicas load it."""
        for replica in members:
            check_tensors(announced, replica.info, "snapshot")
        await self._machine.remember_canary(members)

    async def take(self, update: WeightUpdate, members: Sequence[Replica], snapshot: str) -> None:
        """Load a draft on these replicas and serve it: on all together, or one after the other in a rolling update."""
        try:
            async with self._machine.or_aborted():
                if update.rolling:
                    self._check_rolls(members)
                self._machine.open(update)
                async with self._machine.step(update, "prepare"):
                    path = str(await self._promote(update, members, snapshot))
                findings = await self._swaps(update, members, path).run()
                await to_its_end(self._commit(update, findings))
        except BaseException:  # also where the trainer leaves during the abort
            if update.phase is not Phase.COMMITTED:
                await self._parts.snapshots.withdraw(update.version)
            raise

    async def _commit(self, update: WeightUpdate, findings: Mapping[Replica, Finding]) -> None:
        await self._machine.commit(update, findings)
        self._free_replaced(findings)
        await self._parts.snapshots.settle(update.version)

    def _free_replaced(self, findings: Mapping[Replica, Finding]) -> None:
        """Have engines free the weights before, which they may have kept for an undo, also where the trainer leaves."""
        passed = [replica for replica, finding in findings.items() if finding.may_serve]
        self._parts.catch_up.bring_back(passed, is_awaited=True)

    def _next_version(self, asked: int | None) -> int:
        if asked is not None and asked < self._parts.fleet.next_version:
            raise WeightUpdateConflict(
                f"version = {asked}, but the fleet is at {self._parts.fleet.version}, the next is "
                f"{self._parts.fleet.next_version}, and versions only grow: leave it out"
            )
        return asked or self._parts.fleet.next_version

    def _swaps(self, update: WeightUpdate, members: Sequence[Replica], path: str) -> Swaps:
        """Return the turns in which the replicas take the version in folder `path`."""
        version, timeout_s = update.version, self._parts.config.load_timeout_s

        async def prepare(replicas: Sequence[Replica]) -> Sequence[Replica]:
            return await prepare_all(replicas, path, version, timeout_s)

        async def load(replica: Replica) -> None:
            await replica.engine.load_snapshot(path, version, timeout_s)
            await replica.engine.label_weights(update.label, timeout_s, is_committed=False)

        return Swaps(self._parts, update, members, load, prepare)

    def _check_rolls(self, members: Sequence[Replica]) -> None:
        """Raise `WeightUpdateConflict` where no replica generates, and a rolling update has no use."""
        if self._parts.pauses.is_paused:
            raise WeightUpdateConflict(
                "generation is paused, and a rolling update needs replicas that generate: /resume first, or push "
                "without rolling"
            )
        if not any(replica.can_serve for replica in members):
            raise WeightUpdateConflict("no replica serves, so there is nothing to roll: push without rolling")

    async def _promote(self, update: WeightUpdate, members: Sequence[Replica], snapshot: str) -> Path:
        names = {tensor.name for replica in members for tensor in replica.info.tensors or ()}
        return await self._parts.snapshots.promote(snapshot, update.label, self._parts.fleet.version, names)
