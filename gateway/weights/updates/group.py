"""Updates over a transfer group of the trainer and all engines' workers."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog

from engines.announcement import check_fused, check_tensors, has_others
from engines.engine import Json, ReceiptCopy
from engines.errors import WeightUpdateConflict, WeightUpdateFailed
from engines.types import Dialect, InFlight, ReplicaState
from gateway.fleet.concurrency import together
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import on_all, on_one, try_on_all
from gateway.weights.transfer_group import (
    TransferGroup,
    check_reachable,
    check_some_take_weights,
    check_take_packed,
    checkpoint_bytes,
    rank_offsets,
    transport_of,
)
from gateway.weights.updates.record import Phase, UpdateRecord, num_bytes
from gateway.weights.updates.update import Arrival, Update, UpdateParts, living, reason_of

log = structlog.get_logger()


class GroupArrival(Arrival):
    """Handles the calls of a trainer whose group has all replicas. A member's death breaks it."""

    def __init__(self, parts: UpdateParts) -> None:
        self._parts = parts
        self._timeout_s = parts.config.control_timeout_s
        self._group: TransferGroup | None = None
        self._digests: dict[str, str] = {}

    async def restore(self, record: Json) -> bool:
        """Go on with the group of a gateway that has died between two updates, if all members live."""
        there = {replica.info.incarnation: replica for replica in self._parts.fleet.updatable()}
        if not there.keys() >= set(members := record.get("members", ())):
            return False
        if members:
            self._group = TransferGroup(tuple(there[one] for one in members), record["transport"])
            log.info("transfer group found", replicas=[member.replica_id for member in self._group.members])
        return bool(members)

    async def init(self, init_info: Json) -> Json:
        """Join all replicas to the trainer's group. Return its record for the next gateway."""
        parts, timeout_s = self._parts, self._parts.config.init_timeout_s
        members = tuple(replica for replica in parts.fleet.updatable() if replica.info.takes_weights)
        await parts.catch_up.settled(members, timeout_s)
        check_some_take_weights(members, parts.fleet.updatable())
        check_take_packed(members, init_info)
        check_reachable(members, init_info)
        ranks = rank_offsets(members, init_info)
        await parts.read_canary(members)
        asked = partial(transport_of, timeout_s=self._timeout_s)
        group = TransferGroup(members, await on_one(members[0], asked, self._timeout_s))

        async def join(replica: Replica) -> None:
            await replica.engine.open_weight_group({**init_info, "rank_offset": ranks[replica]}, timeout_s)

        try:
            await on_all(members, join, timeout_s)
        except BaseException:
            # In the background: a worker that waits for the others to join answers once the trainer has left, and the
            # trainer leaves at this error.
            parts.catch_up.bring_back(living(members), leaves_group=True)
            raise
        self._group = group
        log.info("transfer group open", replicas=[member.replica_id for member in members])
        return {"transport": group.transport, "members": [member.info.incarnation for member in members]}

    async def open(self, in_flight: InFlight | None) -> None:
        """Open the next version. No engine is touched yet. Unless it is staged, it is announced, before the trainer's
        broadcast."""
        parts, group = self._parts, await self._whole_group()
        parts.check_none_open()
        for replica in self.lacking():
            if replica.state is ReplicaState.SYNCING:
                reason = "joined after the trainer's transfer group was opened: takes part once a new one is opened"
                parts.fleet.explain(replica, reason)
        # The question for room would free the weights that a refused update has left for its undo.
        await parts.catch_up.settled(group.members, self._timeout_s)
        in_flight = in_flight or parts.config.in_flight
        unstaged = await self._why_unstaged(group, checkpoint_bytes(group.members))
        record = UpdateRecord(parts.fleet.next_version, group.transport, in_flight, unstaged=unstaged)
        update = Update(parts, self, record, group.members)
        update.receivers = group.members
        if unstaged:
            async with update.or_aborted():
                await self._announce(update)

    async def receive(self, update_info: Json) -> None:
        """Have every replica receive the tensors that the trainer is about to send."""
        update, group = self._parts.opened("update_weights"), await self._whole_group()
        timeout_s = self._parts.config.transfer_timeout_s

        async def receive(replica: Replica) -> None:
            engine = replica.engine
            await (engine.stage_weights if update.record.staged else engine.update_weights)(update_info, timeout_s)

        async with self._or_broken(update, group):
            announced = await self._checked(update_info, group)
            if update.record.phase is Phase.OPEN:
                await self._begin(update, group, num_bytes(update_info))
            with update.record.timed("transfer"):
                await on_all(group.members, receive, timeout_s)
        update.record.receive(announced)

    async def close(self, update: Update) -> None:
        """Compare the digests of the tensors that replicas have received."""
        group = await self._whole_group()
        with update.record.timed("digests"):
            for replica in group.members:
                if replica.info.dialect is Dialect.VLLM:
                    check_fused(update.record.names, replica.info)
            received = await on_all(
                group.members, lambda replica: replica.engine.close_receipt(self._timeout_s), self._timeout_s
            )
            _check_receipts(dict(zip(group.members, received, strict=True)))
        self._digests = next(filter(None, received), {})

    async def load(self, update: Update, replica: Replica) -> None:
        """End the update on a replica: by the swap where it is staged."""
        if update.record.staged:
            await replica.engine.start_weight_update(self._timeout_s)
            await replica.engine.load_staged(self._parts.config.load_timeout_s)
        await replica.engine.finish_weight_update(update.record.label, self._timeout_s)

    async def keep_copy(self, update: Update, replicas: Sequence[Replica]) -> None:
        scribe = self._group.scribe if self._group is not None else None
        if update.record.draft is not None and scribe is not None and scribe in replicas:
            timeout_s = self._timeout_s
            with update.record.timed("keep"):
                await try_on_all([scribe], lambda one: one.engine.keep_receipt(timeout_s), timeout_s, "keeps no copy")

    async def after_commit(self, update: Update) -> None:
        """Have the store keep the version; without a copy of it, only remove older ones."""
        await self._parts.note_group()
        scribe = self._group.scribe if self._group is not None else None
        if update.record.draft is None or scribe is None:
            await self._parts.snapshots.settle(update.record.version)
        else:
            self._parts.snapshots.keep(update.record.draft, update.record.label, scribe, self._digests)

    async def leave(self) -> None:
        """Leave the group, if any, which ends a trainer's broadcast."""
        group, self._group = self._group, None
        if group is not None:
            await self._parts.note_group(is_over=True)
            timeout_s = self._timeout_s
            await try_on_all(
                group.members, lambda one: one.engine.close_weight_group(timeout_s), timeout_s, "stays in its group"
            )

    def lacking(self) -> list[Replica]:
        """Return the replicas that take weights and joined after the group was opened, less those that are being
        brought back."""
        members = self._group.members if self._group is not None else ()
        others = [replica for replica in self._parts.fleet.updatable() if replica not in members]
        return [one for one in others if one.info.takes_weights and not self._parts.catch_up.is_busy_with(one)]

    async def _whole_group(self) -> TransferGroup:
        """Return the open group. Abort the update, and raise, where the group has lost a member."""
        group = self._group
        if group is None:
            raise WeightUpdateConflict(
                "there is no transfer group: none was opened, a failed update has closed it, or the gateway was "
                "restarted: call /init_weight_transfer_engine first (TRL: restart the trainer)"
            )
        await self._parts.fleet.settled_within(self._timeout_s)
        if (gone := group.broken_by) is not None:
            error = WeightUpdateFailed(
                f"the transfer group is broken: replica {gone.replica_id} left it ({gone.state}: {gone.reason}); call "
                "/init_weight_transfer_engine to form a new group",
                replica_id=gone.replica_id,
            )
            if self._parts.open is not None:
                await self._parts.open.abort(str(error))
            raise error
        return group

    @asynccontextmanager
    async def _or_broken(self, update: Update, group: TransferGroup) -> AsyncIterator[None]:
        """Abort the update where the block fails, and have the replicas leave the group, which ends the trainer's
        broadcast: in the background, so that the trainer has the reason before its group breaks."""
        try:
            yield
        except BaseException as error:
            self._group = None
            await update.abort(reason_of(error), leaving=group.members)
            await self._parts.note_group(is_over=True)
            raise

    async def _checked(self, update_info: Json, group: TransferGroup) -> Json:
        """Return the announcement under the checkpoint's names. Raise where tensors do not fit the model."""
        announced = update_info
        for replica in group.members:
            if has_others(announced, replica.info):
                announced = await on_one(
                    replica, lambda one: one.engine.announced_as(update_info, self._timeout_s), self._timeout_s
                )
            check_tensors(announced, replica.info, "update_info")
        return announced

    async def _announce(self, update: Update) -> None:
        """Announce the version. With `in_flight: drain`, wait for rollouts in flight."""
        update.announce()
        if self._parts.pauses.drains(update.record):
            with update.record.timed("drain"):
                self._parts.pauses.close_gate()
                await together(map(self._parts.pauses.drained, update.members))

    async def _begin(self, update: Update, group: TransferGroup, size: int) -> None:
        """Prepare receipts on every engine, and the copy into the store on the scribe. Then, unless it is staged, start
        the update on the engines, which are frozen for that."""
        parts, record, timeout_s = self._parts, update.record, self._timeout_s
        await parts.note_group(is_over=True)
        if record.staged and size > checkpoint_bytes(group.members):  # such as in float32
            record.unstaged = await self._why_unstaged(group, size)
            if record.unstaged:
                await self._announce(update)
        scribe = group.scribe
        with record.timed("store"):
            if scribe is not None:
                record.draft = await parts.snapshots.draft(parts.fleet.settled_version, checkpoint_bytes(group.members))
        with record.timed("receipt"):
            await parts.catch_up.settled(group.members, timeout_s)  # a restored replica drops its receipt
            copy = None
            if scribe is not None and record.draft is not None:
                copy = ReceiptCopy(
                    draft=str(record.draft),
                    model=scribe.info.model,
                    base=parts.snapshots.base(parts.fleet.version),
                    names=tuple(tensor.name for tensor in scribe.info.tensors or ()),
                    wait_s=parts.config.store_wait_s,
                )
            await on_all(
                group.members,
                lambda one: one.engine.open_receipt(copy if one is scribe else None, timeout_s),
                timeout_s,
            )
        record.phase = Phase.RECEIVING
        if record.staged:
            return
        with record.timed("pause"):
            await on_all(group.members, parts.pauses.stopping(record), timeout_s)
            update.is_stopped = True
            update.overwrite(group.members)
        with record.timed("begin"):
            await on_all(group.members, lambda one: one.engine.start_weight_update(timeout_s), timeout_s)

    async def _why_unstaged(self, group: TransferGroup, size: int) -> str:
        """Return "" where all replicas have room for `size` bytes beside their weights, else the reason.

        Under a trainer's pause no rollout gains. A replica of several workers generates with collectives of its own,
        beside which a broadcast may deadlock.
        """
        members, timeout_s = group.members, self._timeout_s
        if self._parts.config.stage == "never":
            return "weights.stage is never"
        if self._parts.pauses.is_paused:
            return "the trainer has paused generation"
        if any(one.info.world_size > 1 for one in members):
            return "a replica has several workers"
        if other := next((one for one in members if not one.info.stages), None):
            return f"{other.replica_id} runs without our plugin, or is a vLLM that this gateway did not start"
        fits = await on_all(members, lambda replica: replica.engine.room_to_stage(size, timeout_s), timeout_s)
        full = ", ".join(one.replica_id for one, has_room in zip(members, fits, strict=True) if not has_room)
        return f"no room for {size / 1e9:.1f} GB beside the weights of {full}" if full else ""


def _check_receipts(received: Mapping[Replica, Mapping[str, str]]) -> None:
    """Compare the digests by tensor of the bytes that replicas received, before any of them commits. Raise
    `WeightUpdateFailed` with the tensor, and the replica that received other bytes than most.

    Devices have different kinds of digest; replicas are compared within a kind. An engine without digests has none.
    """
    kinds = {replica: next(iter(digests.values()), "").partition(":")[0] for replica, digests in received.items()}
    for kind in {*kinds.values()} - {""}:
        peers = {replica: digests for replica, digests in received.items() if kinds[replica] == kind}
        pairs = [set(digests.items()) for digests in peers.values()]
        differing = set().union(*pairs) - pairs[0].intersection(*pairs)
        if not differing:
            continue
        name = min(name for name, _ in differing)
        digest = {replica: digests.get(name, "nothing") for replica, digests in peers.items()}
        (most, count), (_, next_count) = Counter(digest.values()).most_common(2)
        odd = [replica for replica in digest if digest[replica] != most] if count > next_count else list(digest)
        told = " and ".join(f"{replica.replica_id} ({digest[replica]})" for replica in odd)
        finding = f"replica {told} received other bytes than its peers" if count > next_count else f"{told} differ"
        raise WeightUpdateFailed(
            f"tensor {name!r} arrived with different bytes: {finding}; the update is not served, send it again",
            replica_id=odd[0].replica_id,
        )
