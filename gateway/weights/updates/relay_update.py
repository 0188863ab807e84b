"""Updates through the relay, which receives a trainer's tensors and writes them into the store for the replicas."""

from collections.abc import Sequence
from pathlib import Path

import structlog

from engines.announcement import check_tensors, has_others
from engines.engine import Json
from engines.errors import RolloutGatewayError
from engines.types import InFlight
from gateway.weights.relay_process import TRANSPORT, WORLD_SIZE, Relay
from gateway.weights.transfer_group import check_world_size, checkpoint_bytes
from gateway.weights.updates.machine import UpdateMachine
from gateway.weights.updates.parts import Parts
from gateway.weights.updates.record import Phase, WeightUpdate
from gateway.weights.updates.store_update import StoreUpdate

log = structlog.get_logger()


class RelayUpdate:
    """Handles the calls of a trainer whose group is itself and the relay."""

    def __init__(self, parts: Parts, relay: Relay, store: StoreUpdate, machine: UpdateMachine) -> None:
        self._parts = parts
        self._relay = relay
        self._store = store
        self._machine = machine
        self._restored: WeightUpdate | None = None
        self._committed: int | None = None
        machine.on_abort(self._drop)

    async def restore(self) -> Json:
        """Go on with the group, and with the update, of a gateway that has died: its trainer repeats the call that was
        cut off. Return the note of the trainer's group; empty where there is none."""
        state = await self._relay.find()
        if not self._relay.is_open:
            return {}
        note: Json = state["note"]
        if not state["draft"]:
            return note
        if note["has_lease"]:  # the trainer's lease has ended with the gateway, and its update with that
            await self._drop()
            return note if self._relay.is_open else {}
        draft = await self._parts.snapshots.reopen(Path(state["draft"]), self._parts.fleet.label)
        if isinstance(draft, int):
            self._committed = draft
        elif draft is not None:
            fleet, in_flight = self._parts.fleet, self._parts.pauses.in_flight(self._parts.fleet.updatable(), None)
            self._restored = update = WeightUpdate(fleet.next_version, TRANSPORT, in_flight, draft=draft)
            for received in state["received"]:
                update.phase = Phase.RECEIVING
                update.receive(received)
            self._machine.register(update)
        log.info("transfer group found", relay=self._relay.report()["pid"], committed=self._committed)
        return note

    async def init(self, init_info: Json) -> None:
        """Join the relay to the trainer's group."""
        await self._store.loaders()
        check_world_size(init_info, WORLD_SIZE, "the relay receives for all replicas")
        await self._relay.open(init_info)
        log.info("transfer group open", relay=self._relay.report()["pid"])

    async def note(self, note: Json) -> None:
        """Keep a note of the trainer's group for the next gateway."""
        await self._relay.note(note)

    async def start(self, in_flight: InFlight | None) -> None:
        """Open the next version. No replica is called yet: all serve until they load."""
        if self._restored is not None and self._machine.update is self._restored:
            await self._machine.abort("its trainer began it again after a restart of the gateway")
        self._restored = self._committed = None
        self._machine.check_none_open()
        members = await self._store.loaders()
        in_flight = self._parts.pauses.in_flight(members, in_flight)
        draft = await self._parts.snapshots.claim(
            self._parts.fleet.settled_version, max(map(checkpoint_bytes, members))
        )
        try:
            await self._relay.begin(draft, members[0].info)
        except BaseException:
            await self._parts.snapshots.discard(draft)
            raise
        self._machine.register(WeightUpdate(self._parts.fleet.next_version, TRANSPORT, in_flight, draft=draft))

    async def receive(self, update_info: Json) -> None:
        """Have the relay receive the tensors that the trainer is about to send."""
        try:
            update = self._machine.opened("update_weights")
            members = await self._store.loaders()
            announced = update_info
            if any(has_others(update_info, replica.info) for replica in members):
                announced = await self._relay.announced_as(update_info)
            for replica in members:
                check_tensors(announced, replica.info, "update_info")
        except RolloutGatewayError as error:
            await self._machine.abort(str(error))
            await self._let_go(update_info)
            raise
        async with self._machine.step(update, "transfer"):
            update.phase = Phase.RECEIVING
            await self._relay.receive(update_info)
        if not update.names.issuperset(announced["names"]):
            update.receive(announced)

    async def finish(self, canary_logprobs: Sequence[float] | None) -> int:
        """Load the relay's draft on the replicas. Return the version now served."""
        if self._machine.update is None and self._committed is not None:
            return self._committed  # by the gateway before, which could not answer
        update = self._machine.opened("finish_weight_update")
        if update is self._restored:
            update.version = self._parts.fleet.next_version  # known once replicas have told theirs
        if update.phase is Phase.OPEN or update.draft is None:
            await self._machine.abort("no tensors were sent")
            return self._parts.fleet.version
        self._parts.canary.check_length(canary_logprobs, self._parts.fleet.updatable())
        update.canary_logprobs = canary_logprobs
        async with self._machine.step(update, "store"):
            await self._relay.end()
            announced = await self._parts.snapshots.finished(update.draft, self._parts.fleet.version)
            members = await self._store.loaders()
            await self._store.check_fits(announced, members)
        # Under a pause no replica generates, so a rolling update would have no use.
        update.rolling = self._parts.config.rolling and not self._parts.pauses.is_paused
        await self._store.take(update, members, update.draft.name)
        return update.version

    async def _let_go(self, update_info: Json) -> None:
        """Receive from a trainer whose announcement was refused: it may already be in its broadcast."""
        try:
            await self._relay.receive(update_info)
        except RolloutGatewayError as error:
            log.warning("the relay has ended, which frees the refused trainer", error=str(error))

    async def _drop(self) -> None:
        """Stop the relay from writing the draft of an aborted update."""
        if not self._relay.is_open:
            return
        try:
            await self._relay.drop()
        except RolloutGatewayError as error:
            log.warning("the relay has ended", error=str(error))
