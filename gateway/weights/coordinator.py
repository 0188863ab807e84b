"""Weight updates as one event for the whole fleet: the calls of one trainer at a time, one update at a time.

    flat_update.py    the trainer's group has all engines' workers, which receive by themselves
    relay_update.py   the trainer's group has the relay, which receives for all, into the store
    store_update.py   the trainer writes into the store itself; replicas load what lies there
    update_machine.py what these have in common: OPEN -> RECEIVING -> VERIFYING -> COMMITTED | ABORTED

Tensors never pass through this process: the trainer's transfer group joins the engines' workers to the trainer, or the
relay, from which they go through the store.
"""

import asyncio
import importlib.util
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from engines.engine import Json
from engines.errors import WeightUpdateConflict
from engines.types import Dialect, InFlight
from gateway.config.schema import WeightsConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import Metrics
from gateway.fleet.scheduler import Scheduler
from gateway.weights.canary import Canary
from gateway.weights.catch_up import CatchUp
from gateway.weights.pauses import Pauses
from gateway.weights.relay_process import WORLD_SIZE as RELAY_WORLD_SIZE
from gateway.weights.relay_process import Relay
from gateway.weights.snapshots import Snapshots
from gateway.weights.transfer_group import check_some_take_weights, checkpoint_bytes, transport_of
from gateway.weights.updates.flat_update import FlatUpdate
from gateway.weights.updates.machine import UpdateMachine
from gateway.weights.updates.parts import Parts
from gateway.weights.updates.record import WeightUpdate
from gateway.weights.updates.relay_update import RelayUpdate
from gateway.weights.updates.store_update import StoreUpdate
from gateway.weights.updates.update_log import UpdateLog

log = structlog.get_logger()


class WeightCoordinator:
    """Takes a trainer's calls to the way that its weights come, and never two at once."""

    def __init__(
        self, config: WeightsConfig, fleet: Fleet, scheduler: Scheduler, metrics: Metrics, snapshots: Snapshots
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._snapshots = snapshots
        self._canary = canary = Canary(config.canary, fleet.models.groups)
        self.pauses = pauses = Pauses(config, fleet, scheduler)
        self._catch_up = catch_up = CatchUp(config, fleet, snapshots, canary, lambda: pauses.is_paused)
        self._updates = UpdateLog(metrics)
        self._relay = Relay(config, _log_dir(fleet))
        parts = Parts(config, fleet, canary, pauses, snapshots, catch_up)
        self._machine = machine = UpdateMachine(parts, self._updates)
        self._by_store = StoreUpdate(parts, machine)
        self._by_relay = RelayUpdate(parts, self._relay, self._by_store, machine)
        self._flat = FlatUpdate(parts, machine)
        self._busy_with = ""
        fleet.on_change(lambda: metrics.observe_versions(fleet.version, fleet.serving_behind))

    @property
    def update(self) -> WeightUpdate | None:
        """The update in progress, if any."""
        return self._machine.update

    @property
    def updates(self) -> UpdateLog:
        """The updates that have ended."""
        return self._updates

    async def world_size(self) -> int:
        """Workers that a trainer's transfer group must make room for."""
        await self._fleet.settled_within(self._config.control_timeout_s)
        if not await self._why_flat():
            return RELAY_WORLD_SIZE
        return sum(replica.info.world_size for replica in self._fleet.updatable())

    async def backend(self) -> str | None:
        """What trainers send over, in the word of vLLM's weight transfer; None where the engines say it themselves."""
        if self._fleet.models.all_frozen or await self._why_flat():
            return None
        return self._relay.backend

    def relay_report(self) -> Json:
        return {"mode": self._config.relay, **self._relay.report()}

    def canary_token_ids(self) -> list[int]:
        """What a trainer scores with its new weights to have the engines' log-probs compared with its own."""
        members = [replica for replica in self._fleet.updatable() if replica.info.takes_weights]
        check_some_take_weights(members, self._fleet.updatable())
        return self._canary.token_ids(members)

    async def init(self, init_info: Json) -> None:
        """Open a trainer's group. A trainer that starts anew thereby ends what the last one left."""
        async with self._exclusively("init_weight_transfer_engine"):
            await self._machine.abort("a trainer opened a new transfer group")
            await self._flat.close()
            await self._fleet.settled_within(self._config.control_timeout_s)
            why = await self._why_flat()
            if why:
                log.info("flat transfer group", reason=why)
                await self._relay.close()
            with self._metrics.weight_update_seconds.labels("init").time():
                await (self._flat if why else self._by_relay).init(init_info)

    async def start(self, in_flight: InFlight | None = None) -> None:
        """Open the next version. `in_flight` is what becomes of rollouts in flight, as configured unless given."""
        async with self._exclusively("start_weight_update"):
            await self._way.start(in_flight)

    async def receive(self, update_info: Json) -> None:
        """Have the trainer's group receive the tensors that it is about to send."""
        async with self._exclusively("update_weights"):
            await self._way.receive(update_info)

    async def finish(self, canary_logprobs: Sequence[float] | None = None) -> int:
        """Commit on every replica, verify, and serve again. Returns the version now served.

        `canary_logprobs` are the trainer's own of `canary_token_ids`, all but the first.
        """
        async with self._exclusively("finish_weight_update"):
            return await self._way.finish(canary_logprobs)

    async def load(
        self,
        snapshot: str,
        version: int | None = None,
        canary_logprobs: Sequence[float] | None = None,
        *,
        rolling: bool | None = None,
        in_flight: InFlight | None = None,
    ) -> int:
        """Bring all replicas to the version that a trainer wrote into the store. Returns it once they serve it.

        Replicas of all kinds take it together, or one after the other with `rolling`, which is as `weights.rolling`
        says unless given. `version` is the next one unless given.
        """
        async with self._exclusively("v1/weight_updates"):
            return await self._by_store.load(snapshot, version, canary_logprobs, rolling=rolling, in_flight=in_flight)

    async def abandon(self, reason: str) -> None:
        """End the open update, if any, and close its group: the trainer begins anew."""
        async with self._exclusively("v1/weight_updates"):
            if self._machine.update is not None:
                await self._machine.abort(reason)
                await self._flat.close()

    async def run(self) -> None:
        """Abort an update whose trainer has gone silent, and bring back replicas that are behind, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_update(), name="watch update")
                tasks.create_task(self._catch_up.run(), name="catch up")
        finally:
            await self._relay.close()

    @property
    def _way(self) -> FlatUpdate | RelayUpdate:
        """How the tensors of the trainer's group come."""
        return self._by_relay if self._relay.is_open else self._flat

    async def _watch_update(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._config.idle_timeout_s / 4))
            update = self._machine.update
            if update is None or self._busy_with:
                continue
            if time.monotonic() - update.touched_at > self._config.idle_timeout_s:
                async with self._exclusively("idle watch"):
                    await self._machine.abort(f"no word from the trainer for {self._config.idle_timeout_s:g} s")

    async def _why_flat(self) -> str:
        """Why a trainer gets a group of all workers; empty where it gets one of itself and the relay."""
        if self._config.relay != "auto":
            return "" if self._config.relay == "always" else "weights.relay is never"
        members = [replica for replica in self._fleet.updatable() if replica.info.takes_weights]
        if not members:
            return "no replica takes weights"
        is_mixed = len({replica.info.dialect for replica in members}) > 1
        if not is_mixed and max(len(members), self._fleet.expected_of_policy) == 1:
            return "there is one replica"
        if not all(replica.info.loads_snapshots for replica in members):
            return "not every replica can load weights from a folder"
        # In a mixed fleet trainers send as vLLM receives.
        asked = next((replica for replica in members if replica.info.dialect is Dialect.VLLM), members[0])
        if (backend := await transport_of(asked, self._config.control_timeout_s)) != self._relay.backend:
            return f"engines receive over {backend}, the relay over {self._relay.backend} (weights.relay_device)"
        needed = "vllm" if self._config.relay_device else "torch"
        if importlib.util.find_spec(needed) is None:
            return f"the gateway's Python, which runs the relay, has no {needed}"
        return await self._snapshots.why_not(max(map(checkpoint_bytes, members)))

    @asynccontextmanager
    async def _exclusively(self, call: str) -> AsyncIterator[None]:
        """Weight calls never overlap: a second trainer, or a replayed call, learns who is first instead of waiting."""
        if self._busy_with:
            raise WeightUpdateConflict(f"/{call} while /{self._busy_with} is still running: wait for its answer")
        self._busy_with = call
        try:
            yield
        finally:
            self._busy_with = ""
            if self._machine.update is not None:
                self._machine.update.touched_at = time.monotonic()


def _log_dir(fleet: Fleet) -> str:
    """Where the policy's engines have their logs."""
    groups = fleet.models.groups.values()
    return next((group.log_dir for group in groups if not group.frozen), next(iter(groups)).log_dir)
