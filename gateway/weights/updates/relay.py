"""Updates through the relay, which receives a trainer's tensors and writes them into the store for the replicas."""

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
    """Handles the calls of a trainer whose group is itself and the relay."""

    def __init__(self, parts: UpdateParts, relay: Relay) -> None:
        super().__init__(parts)
        self.relay = relay

    async def restore(self, record: Json) -> bool:
        """Go on with the relay of a gateway that has died, if the record is of its group and it lives."""
        await self.relay.find(in_group=record.get("transport") == TRANSPORT)
        return self.relay.is_open

    async def init(self, init_info: Json) -> Json:
        """Join the relay to the trainer's group. Return its record for the next gateway."""
        await self.loaders()
        check_world_size(init_info, WORLD_SIZE, "the relay receives for all replicas")
        await self.relay.open(init_info)
        log.info("transfer group open", relay=self.relay.report()["pid"])
        return {"transport": TRANSPORT}

    async def open(self, in_flight: InFlight | None) -> None:
        """Open the next version. No replica is called yet: all serve until they load."""
        parts = self._parts
        parts.check_none_open()
        members = await self.loaders()
        draft = await parts.snapshots.claim(parts.fleet.settled_version, checkpoint_bytes(members))
        try:
            await parts.note_group(is_over=True)
            await self.relay.begin(draft, members[0].info)
        except BaseException:
            await parts.snapshots.discard(draft)
            raise
        in_flight = in_flight or parts.config.in_flight
        Update(parts, self, UpdateRecord(parts.fleet.next_version, TRANSPORT, in_flight, draft=draft))

    async def receive(self, update_info: Json) -> None:
        """Have the relay receive the tensors that the trainer is about to send."""
        try:
            update = self._parts.opened("update_weights")
            announced = await self._checked(update_info)
        except RolloutGatewayError as error:
            if self._parts.open is not None:
                await self._parts.open.abort(str(error))
            try:  # the refused trainer may already be in its broadcast
                await self.relay.receive(update_info)
            except RolloutGatewayError as lost:
                log.warning("the relay has ended, which frees the refused trainer", error=str(lost))
            raise
        async with update.or_aborted():
            with update.record.timed("transfer"):
                update.record.phase = Phase.RECEIVING
                await self.relay.receive(update_info)
        update.record.receive(announced)

    async def close(self, update: Update) -> None:
        """Have the relay end the draft, compare its bytes with their digests, and make it a version of the store."""
        parts, record = self._parts, update.record
        assert record.draft is not None
        with record.timed("store"):
            await self.relay.end()
            announced = await parts.snapshots.finished(record.draft)
            update.members = await self.loaders()
            await self._check_fits(announced, update.members)
        await super().close(update)

    async def after_commit(self, update: Update) -> None:
        await super().after_commit(update)
        await self._parts.note_group()

    async def dropped(self, update: Update) -> None:
        if self.relay.is_open:
            try:
                await self.relay.drop()  # it writes the draft
            except RolloutGatewayError as error:
                log.warning("the relay has ended", error=str(error))
        await super().dropped(update)
        if self.relay.is_open:
            await self._parts.note_group()

    async def _checked(self, update_info: Json) -> Json:
        """Return the announcement under the checkpoint's names. Raise where tensors do not fit the model."""
        members = await self.loaders()
        if any(has_others(update_info, replica.info) for replica in members):
            update_info = await self.relay.announced_as(update_info)
        for replica in members:
            check_tensors(update_info, replica.info, "update_info")
        return update_info
