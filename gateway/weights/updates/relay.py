"""Updates through the relay, which receives a trainer's tensors and writes them into the store for the replicas."""

from pathlib import Path

import structlog

from engines.announcement import check_tensors, has_others
from engines.engine import Json
from engines.errors import RolloutGatewayError
from engines.types import InFlight
from gateway.weights.relay_process import TRANSPORT, WORLD_SIZE, Relay
from gateway.weights.transfer_group import check_world_size, checkpoint_bytes
from gateway.weights.updates.record import Phase, UpdateRecord
from gateway.weights.updates.store import StoreArrival
from gateway.weights.updates.update import Update, UpdateParts

log = structlog.get_logger()


class RelayArrival(StoreArrival):
    """Handles the calls of a trainer whose group is itself and the relay. `committed_before` is the version that the
    gateway before this one has committed, and could not answer."""

    def __init__(self, parts: UpdateParts, relay: Relay) -> None:
        super().__init__(parts)
        self.relay = relay
        self.committed_before: int | None = None
        self._restored: Update | None = None

    async def restore(self) -> Json:
        """Go on with the group, and with the update, of a gateway that has died: its trainer repeats the call that was
        cut off. Return the note of the trainer's group; empty where there is none."""
        parts, state = self._parts, await self.relay.find()
        if not self.relay.is_open:
            return {}
        note: Json = state["note"]
        if not state["draft"]:
            return note
        draft = await parts.snapshots.reopen(Path(state["draft"]), parts.fleet.label)
        if isinstance(draft, int):
            self.committed_before = draft
        elif draft is not None:
            in_flight = parts.pauses.in_flight(parts.fleet.updatable(), None)
            record = UpdateRecord(parts.fleet.next_version, TRANSPORT, in_flight, draft=draft)
            for received in state["received"]:
                record.phase = Phase.RECEIVING
                record.receive(received)
            self._restored = Update(parts, self, record)
        log.info("transfer group found", relay=self.relay.report()["pid"], committed=self.committed_before)
        return note

    async def init(self, init_info: Json) -> None:
        """Join the relay to the trainer's group."""
        await self.loaders()
        check_world_size(init_info, WORLD_SIZE, "the relay receives for all replicas")
        await self.relay.open(init_info)
        log.info("transfer group open", relay=self.relay.report()["pid"])

    async def note(self, note: Json) -> None:
        """Keep a note of the trainer's group for the next gateway."""
        await self.relay.note(note)

    async def open(self, in_flight: InFlight | None) -> None:
        """Open the next version. No replica is called yet: all serve until they load."""
        parts = self._parts
        if self._restored is not None and parts.open is self._restored:
            await self._restored.abort("its trainer began it again after a restart of the gateway")
        self._restored = self.committed_before = None
        parts.check_none_open()
        members = await self.loaders()
        in_flight = parts.pauses.in_flight(members, in_flight)
        draft = await parts.snapshots.claim(parts.fleet.settled_version, checkpoint_bytes(members))
        try:
            await self.relay.begin(draft, members[0].info)
        except BaseException:
            await parts.snapshots.discard(draft)
            raise
        Update(parts, self, UpdateRecord(parts.fleet.next_version, TRANSPORT, in_flight, draft=draft))

    async def receive(self, update_info: Json) -> None:
        """Have the relay receive the tensors that the trainer is about to send."""
        try:
            update = self._parts.opened("update_weights")
            announced = await self._checked(update_info)
        except RolloutGatewayError as error:
            if self._parts.open is not None:
                await self._parts.open.abort(str(error))
            await self._let_go(update_info)
            raise
        async with update.or_aborted():
            with update.record.timed("transfer"):
                update.record.phase = Phase.RECEIVING
                await self.relay.receive(update_info)
        if not update.record.names.issuperset(announced["names"]):
            update.record.receive(announced)

    async def close(self, update: Update) -> None:
        """Have the relay end the draft, compare its bytes with their digests, and make it a version of the store."""
        parts, record = self._parts, update.record
        assert record.draft is not None
        if update is self._restored:
            record.version = parts.fleet.next_version  # known once replicas have told theirs
        with record.timed("store"):
            await self.relay.end()
            announced = await parts.snapshots.finished(record.draft)
            update.members = await self.loaders()
            await self._check_fits(announced, update.members)
        await super().close(update)

    async def dropped(self, update: Update) -> None:
        await self._drop()
        await super().dropped(update)

    async def _checked(self, update_info: Json) -> Json:
        """Return the announcement under the checkpoint's names. Raise where tensors do not fit the model."""
        members = await self.loaders()
        if any(has_others(update_info, replica.info) for replica in members):
            update_info = await self.relay.announced_as(update_info)
        for replica in members:
            check_tensors(update_info, replica.info, "update_info")
        return update_info

    async def _let_go(self, update_info: Json) -> None:
        """Receive from a trainer whose announcement was refused: it may already be in its broadcast."""
        try:
            await self.relay.receive(update_info)
        except RolloutGatewayError as error:
            log.warning("the relay has ended, which frees the refused trainer", error=str(error))

    async def _drop(self) -> None:
        """Stop the relay from writing the draft of an aborted update."""
        if not self.relay.is_open:
            return
        try:
            await self.relay.drop()
        except RolloutGatewayError as error:
            log.warning("the relay has ended", error=str(error))
