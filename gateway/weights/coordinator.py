"""The weight coordinator: one trainer's call at a time, one update at a time, for the whole fleet.

    updates/group.py   the trainer's group has all engines' workers, which receive the tensors
    updates/relay.py   the trainer's group has the relay, which writes the tensors into the store
    updates/store.py   the trainer writes into the store; replicas load the version from there
    updates/update.py  the steps of all three, from there to the commit

Tensors never pass through this process.
"""

import asyncio
import importlib.util
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import structlog

from engines.engine import Json
from engines.errors import RolloutGatewayError, WeightUpdateConflict, WeightUpdateFailed
from engines.store.weight_store import GROUP
from engines.types import Dialect, InFlight
from gateway.config.schema import WeightsConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.replica_calls import on_one
from gateway.weights.canary import Canary
from gateway.weights.catch_up import CatchUp
from gateway.weights.pauses import Pauses
from gateway.weights.relay_process import WORLD_SIZE as RELAY_WORLD_SIZE
from gateway.weights.relay_process import Relay
from gateway.weights.snapshots import Snapshots
from gateway.weights.transfer_group import check_some_take_weights, checkpoint_bytes, transport_of
from gateway.weights.updates.group import GroupArrival
from gateway.weights.updates.record import Phase, UpdateLog, UpdateRecord
from gateway.weights.updates.relay import RelayArrival
from gateway.weights.updates.store import StoreArrival
from gateway.weights.updates.update import UpdateParts

log = structlog.get_logger()


class WeightCoordinator:
    """Sends a trainer's calls to the kind of update that it uses, one call at a time."""

    def __init__(
        self, config: WeightsConfig, fleet: Fleet, scheduler: Scheduler, metrics: Metrics, snapshots: Snapshots
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._snapshots = snapshots
        self._canary = canary = Canary(config.canary, fleet.models.groups)
        self.pauses = Pauses(config, fleet, scheduler)
        self._catch_up = CatchUp(config, fleet, snapshots, canary)
        self.updates = UpdateLog(metrics, fleet.events)
        self._relay = Relay(config, snapshots, _log_dir(fleet))
        self._parts = parts = UpdateParts(config, fleet, canary, self.pauses, snapshots, self._catch_up, self.updates)
        self._by_store = StoreArrival(parts)
        self._by_relay = RelayArrival(parts, self._relay)
        self._by_group = GroupArrival(parts)
        self._busy_with = ""
        fleet.on_change(lambda: metrics.observe_version(fleet.version))

    @property
    def update(self) -> UpdateRecord | None:
        """The update in progress, if any."""
        return self._parts.open.record if self._parts.open is not None else None

    async def world_size(self) -> int:
        """Number of workers in a trainer's transfer group, without the trainer."""
        await self._fleet.settled_within(self._config.control_timeout_s)
        if not await self._why_flat():
            return RELAY_WORLD_SIZE
        return sum(replica.info.world_size for replica in self._fleet.updatable())

    async def backend(self) -> str | None:
        """The relay's backend, by vLLM's name; None for a group of engines, which report their own."""
        if self._fleet.models.all_frozen or await self._why_flat():
            return None
        return self._relay.backend

    def relay_report(self) -> Json:
        return {"mode": self._config.relay, **self._relay.report()}

    def canary_token_ids(self) -> list[int]:
        """The tokens that a trainer scores with its new weights, for comparison with the engines' log-probs."""
        members = [replica for replica in self._fleet.updatable() if replica.info.takes_weights]
        check_some_take_weights(members, self._fleet.updatable())
        return self._canary.token_ids(members)

    async def init(self, init_info: Json) -> None:
        """Open a trainer's group. An update and a group that an earlier trainer left open end first."""
        async with self._exclusively("init_weight_transfer_engine"):
            self._parts.group = {}
            if self._parts.open is not None:
                await self._parts.open.abort("a trainer opened a new transfer group")
            await self._by_group.leave()
            await self._parts.note_group(is_over=True)
            await self._fleet.settled_within(self._config.control_timeout_s)
            why = await self._why_flat()
            if why:
                log.info("flat transfer group", reason=why)
                await self._relay.close()
            way = self._by_group if why else self._by_relay
            with self._metrics.weight_update_seconds.labels("init").time():
                record = await way.init(init_info)
            place = f"{init_info.get('master_address')}:{init_info.get('master_port')}"
            self._parts.group = record | {"place": place}
            await self._parts.note_group()

    async def start(
        self, in_flight: InFlight | None = None, version: int | None = None, group: str | None = None
    ) -> None:
        """Open the next version, which must be `version`, if given. `in_flight` overrides weights.in_flight. `group` is
        the place of the trainer's group, which must be the open one."""
        async with self._exclusively("start_weight_update"):
            self._check_is_whole(group)
            if version not in (None, self._fleet.next_version):
                raise WeightUpdateConflict(
                    f"version = {version}, but the fleet is at {self._fleet.version} and the next is "
                    f"{self._fleet.next_version}: leave it out"
                )
            await self._way.open(in_flight)

    async def receive(self, update_info: Json, group: str | None = None) -> None:
        """Receive the tensors that the trainer is about to send."""
        async with self._exclusively("update_weights"):
            self._check_group(group)
            if group is not None:
                self._parts.opened("update_weights")  # its trainer ends its broadcast itself
            await self._way.receive(update_info)

    async def finish(self, canary_logprobs: Sequence[float] | None = None, group: str | None = None) -> int:
        """Commit on every replica, verify, and serve again. Returns the version now served.

        `canary_logprobs` are the trainer's own of `canary_token_ids`, all but the first.
        """
        async with self._exclusively("finish_weight_update"):
            self._check_group(group)
            update = self._parts.opened("finish_weight_update")
            if update.record.phase is Phase.OPEN:
                await update.abort("no tensors were sent")
                return self._fleet.version
            self._canary.check_length(canary_logprobs, self._fleet.updatable())
            return await update.take(canary_logprobs)

    async def load(
        self,
        snapshot: str,
        version: int | None = None,
        canary_logprobs: Sequence[float] | None = None,
        in_flight: InFlight | None = None,
    ) -> int:
        """Load the draft that a trainer wrote into the store on all replicas. Returns its version once they serve it.

        `version` is the next one unless given.
        """
        async with self._exclusively("v1/weight_updates"):
            return await self._by_store.push(snapshot, version, canary_logprobs, in_flight)

    def _check_group(self, asked: str | None) -> None:
        """Raise `WeightUpdateConflict` for a trainer that names its group where another has opened one since.

        Engines would wait in this group for tensors that come in the other. TRL names no group.
        """
        place = self._parts.group.get("place", asked)
        if asked is not None and asked != place:
            raise WeightUpdateConflict(
                f"the transfer group of {asked} is over: another trainer has opened one, of {place}; end the other "
                "trainer, and call /init_weight_transfer_engine to form a new group"
            )

    def _check_is_whole(self, asked: str | None) -> None:
        """Raise where the trainer's group is not the open one. A trainer that names its group can open another: it does
        so, at a `WeightUpdateFailed`, where the group is gone, or lacks a replica that has joined since."""
        self._check_group(asked)
        if asked is None:
            return
        if not self._parts.group:
            raise WeightUpdateFailed(
                f"the transfer group of {asked} is gone, as after a restart of the gateway: call "
                "/init_weight_transfer_engine to form a new group"
            )
        if self._way is self._by_group and (lacking := self._by_group.lacking()):
            raise WeightUpdateFailed(
                f"the group lacks replica {lacking[0].replica_id}, which has joined since: call "
                "/init_weight_transfer_engine to form a new group"
            )

    async def abandon(self, reason: str, group: str | None = None) -> None:
        """Abort the open update, if any, and close its group. The name of a trainer's `group` keeps it from another's
        update."""
        async with self._exclusively("v1/weight_updates"):
            self._check_group(group)
            if self._parts.open is not None:
                await self._parts.open.abort(reason)
                await self._by_group.leave()

    async def restore(self) -> None:
        """Take over the trainer's group of a gateway that has died, before the first call comes."""
        try:
            record = await self._snapshots.record(GROUP)
            if await self._by_relay.restore(record) or await self._by_group.restore(record):
                self._parts.group = record
        except RolloutGatewayError as error:
            log.error("the trainer's group is not taken over", error=str(error))
            await self._relay.close()

    async def run(self) -> None:
        """Abort updates whose trainer is silent, and bring back replicas that are behind, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_update(), name="watch update")
                tasks.create_task(self._catch_up.run(), name="catch up")
        finally:
            await self._relay.close()

    @property
    def _way(self) -> GroupArrival | RelayArrival:
        """The way by which tensors arrive in the trainer's group."""
        return self._by_relay if self._relay.is_open else self._by_group

    async def _watch_update(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._config.idle_timeout_s / 4))
            update, bound_s = self._parts.open, self._config.idle_timeout_s
            if update is not None and not self._busy_with and time.monotonic() - update.touched_at > bound_s:
                async with self._exclusively("idle watch"):
                    await update.abort(f"no word from the trainer for {bound_s:g} s")

    async def _why_flat(self) -> str:
        """The reason for a group of all workers; empty where the group is the trainer and the relay."""
        if self._config.relay != "auto":
            return "" if self._config.relay == "always" else "weights.relay is never"
        members = [replica for replica in self._fleet.updatable() if replica.info.takes_weights]
        if not members:
            return "no replica takes weights"
        is_mixed = len({replica.info.dialect for replica in members}) > 1
        if not is_mixed and max(len(members), self._fleet.most_of_policy) == 1:
            return "there is one replica"
        if not all(replica.info.loads_snapshots for replica in members):
            return "not every replica can load weights from a folder"
        # In a mixed fleet trainers send over vLLM's backend.
        asked = next((replica for replica in members if replica.info.dialect is Dialect.VLLM), members[0])
        timeout_s = self._config.control_timeout_s
        backend = await on_one(asked, partial(transport_of, timeout_s=timeout_s), timeout_s)
        if backend != self._relay.backend:
            return f"engines receive over {backend}, the relay over {self._relay.backend} (weights.relay_device)"
        needed = "vllm" if self._config.relay_device else "torch"
        if importlib.util.find_spec(needed) is None:
            return f"the gateway's Python, which runs the relay, has no {needed}"
        return await self._snapshots.why_not(checkpoint_bytes(members))

    @asynccontextmanager
    async def _exclusively(self, call: str) -> AsyncIterator[None]:
        """Refuses a call while another runs: a second trainer, or a replayed call, gets an answer instead of a wait."""
        if self._busy_with:
            raise WeightUpdateConflict(f"/{call} while /{self._busy_with} is still running: wait for its answer")
        self._busy_with = call
        try:
            yield
        finally:
            self._busy_with = ""
            if self._parts.open is not None:
                self._parts.open.touched_at = time.monotonic()


def _log_dir(fleet: Fleet) -> Path:
    """The folder of the policy's engine logs."""
    groups = fleet.models.groups.values()
    return next((group.log_folder for group in groups if not group.frozen), next(iter(groups)).log_folder)
