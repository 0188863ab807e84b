"""Updates over a transfer group of the trainer and all engines' workers."""

from collections.abc import Mapping, Sequence

import structlog

from engines.announcement import check_fused, check_tensors, has_others
from engines.engine import Json, ReceiptCopy
from engines.errors import RolloutGatewayError, StoreFailed, WeightUpdateConflict, WeightUpdateFailed
from engines.store.weight_store import GROUP
from engines.types import Dialect, InFlight, ReplicaState
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import on_all, try_on_all
from gateway.fleet.together import to_its_end, together
from gateway.weights.receipts import check_receipts
from gateway.weights.transfer_group import (
    TransferGroup,
    check_capable,
    check_one_protocol,
    check_reachable,
    check_some_take_weights,
    checkpoint_bytes,
    rank_offsets,
    transport_of,
)
from gateway.weights.updates.machine import UpdateMachine, living
from gateway.weights.updates.parts import Parts
from gateway.weights.updates.record import Phase, WeightUpdate, num_bytes
from gateway.weights.updates.swaps import Load, Swaps
from gateway.weights.verdicts import Finding, Result

log = structlog.get_logger()


class FlatUpdate:
    """Handles the calls of a trainer whose group has all replicas. A member's death breaks the group."""

    def __init__(self, parts: Parts, machine: UpdateMachine) -> None:
        self._parts = parts
        self._machine = machine
        self._group: TransferGroup | None = None
        self._record: Json = {}

    async def restore(self) -> Json:
        """Go on with the group of a gateway that has died between two updates, if all members live. Return its note;
        empty where there is none."""
        if not (record := await self._parts.snapshots.record(GROUP)):
            return {}
        there = {replica.info.incarnation: replica for replica in self._parts.fleet.updatable()}
        if not there.keys() >= set(record["members"]):
            return {}
        self._record = record
        self._group = TransferGroup(tuple(there[one] for one in record["members"]), record["transport"])
        log.info("transfer group found", replicas=[member.replica_id for member in self._group.members])
        note: Json = record["note"]
        return note

    async def note(self, note: Json) -> None:
        """Keep a note of the trainer's group for the next gateway."""
        assert self._group is not None
        members = [member.info.incarnation for member in self._group.members]
        self._record = {"note": note, "members": members, "transport": self._group.transport}
        await self._remember(self._record)

    async def _remember(self, record: Json) -> None:
        """Write the record of the group; an empty one during an update, at whose breach the group is over."""
        try:
            await self._parts.snapshots.note(GROUP, record)
        except StoreFailed as error:  # only a restarted gateway reads it
            log.warning("not noted: the transfer group", error=str(error))

    async def init(self, init_info: Json) -> None:
        """Join all replicas to the trainer's group."""
        members = tuple(replica for replica in self._parts.fleet.updatable() if replica.info.takes_weights)
        await self._parts.catch_up.settled(members, self._parts.config.init_timeout_s)
        check_some_take_weights(members, self._parts.fleet.updatable())
        check_capable(members)
        check_one_protocol(members, init_info)
        check_reachable(members, init_info)
        ranks = rank_offsets(members, init_info)
        await self._machine.remember_canary(members)
        group = TransferGroup(members, await transport_of(members[0], self._parts.config.control_timeout_s))
        try:
            await on_all(
                members,
                lambda replica: replica.engine.open_weight_group(
                    {**init_info, "rank_offset": ranks[replica]}, self._parts.config.init_timeout_s
                ),
                self._parts.config.init_timeout_s,
            )
        except BaseException:
            # In the background: a worker that waits for the others to join answers once the trainer has left, and the
            # trainer leaves at this error.
            self._parts.catch_up.bring_back(living(members), leaves_group=True)
            raise
        self._group = group
        log.info("transfer group open", replicas=[member.replica_id for member in members])

    async def start(self, in_flight: InFlight | None) -> None:
        """Open the next version. No engine is touched yet. Unless it is staged, it is announced, before the trainer's
        broadcast."""
        group = await self._whole_group()
        self._machine.check_none_open()
        for replica in self.lacking():
            if replica.state is ReplicaState.SYNCING:
                reason = "joined after the trainer's transfer group was opened: takes part once a new one is opened"
                self._parts.fleet.explain(replica, reason)
        # The question for room would free the weights that a refused update has left for its undo.
        await self._parts.catch_up.settled(group.members, self._parts.config.control_timeout_s)
        in_flight = self._parts.pauses.in_flight(group.members, in_flight)
        unstaged = await self._why_unstaged(group, _checkpoint_bytes(group))
        version = self._parts.fleet.next_version
        update = WeightUpdate(version, group.transport, in_flight, unstaged=unstaged, receivers=group.members)
        if update.staged:
            self._machine.register(update)
        else:
            await self._announce(update)

    async def receive(self, update_info: Json) -> None:
        """Have every replica receive the tensors that the trainer is about to send."""
        update, group = self._machine.opened("update_weights"), await self._whole_group()
        try:
            announced = update_info
            for replica in group.members:
                if has_others(announced, replica.info):
                    announced = await replica.engine.announced_as(update_info, self._parts.config.control_timeout_s)
                check_tensors(announced, replica.info, "update_info")
        except RolloutGatewayError as error:
            # The trainer may already be in its broadcast, which ends when the replicas leave the group: in the
            # background, so that the trainer has the reason before its group breaks.
            self._group = None
            await self._machine.abort(str(error), leaving=group.members)
            await self._remember({})
            raise
        try:
            if update.phase is Phase.OPEN:
                await self._remember({})
                await self._stage_no_more_than_fits(update, group, num_bytes(update_info))
                await self._begin(update, group)
            async with self._machine.step(update, "transfer", leaving=group.members):
                await self._transfer(update, group, update_info)
        except BaseException:
            self._group = None
            raise
        update.receive(announced)

    async def finish(self, canary_logprobs: Sequence[float] | None) -> int:
        """Commit on every replica, verify, and serve again. Return the version now served."""
        update, group = self._machine.opened("finish_weight_update"), await self._whole_group()
        if update.phase is Phase.OPEN:
            await self._machine.abort("no tensors were sent")
            return self._parts.fleet.version
        self._parts.canary.check_length(canary_logprobs, group.members)
        update.canary_logprobs = canary_logprobs
        async with self._machine.step(update, "digests"):
            for replica in group.members:
                if replica.info.dialect is Dialect.VLLM:
                    check_fused(update.names, replica.info)
            digests = await self._receipts(group)
        if update.staged:
            self._machine.open(update)
        async with self._machine.or_aborted():
            findings = await Swaps(self._parts, update, group.members, self._load(update)).run()
        if update.draft is not None:
            async with self._machine.step(update, "keep"):
                # Before the commit, which restores a replica that failed: that replica may have the copy.
                await self._keep_receipts(_reached(findings))
        await to_its_end(self._commit(update, group, findings, digests))
        return update.version

    async def _commit(
        self, update: WeightUpdate, group: TransferGroup, findings: Mapping[Replica, Finding], digests: dict[str, str]
    ) -> None:
        await self._machine.commit(update, findings)
        if update.draft is None and update.staged:
            # After the commit: without a store only these weights can undo an update whose trainer leaves before it.
            await self._keep_receipts(_reached(findings))
        await self._remember(self._record)
        await self._keep(update, group.scribe, digests)

    async def close(self) -> None:
        """Leave the group, if any, which ends a trainer's broadcast."""
        group, self._group = self._group, None
        await self._remember({})
        if group is not None:
            timeout_s = self._parts.config.control_timeout_s
            await try_on_all(group.members, lambda engine: engine.close_weight_group(timeout_s))

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
        await self._parts.fleet.settled_within(self._parts.config.control_timeout_s)
        if (gone := group.broken_by) is not None:
            error = WeightUpdateFailed(
                f"the transfer group is broken: replica {gone.replica_id} left it ({gone.state}: {gone.reason}); call "
                "/init_weight_transfer_engine to form a new group",
                replica_id=gone.replica_id,
            )
            await self._machine.abort(str(error))
            raise error
        return group

    async def _announce(self, update: WeightUpdate, *, leaving: Sequence[Replica] = ()) -> None:
        """Announce the version. With `in_flight: drain`, wait for rollouts in flight."""
        self._machine.open(update)
        if self._parts.pauses.drains(update):
            async with self._machine.step(update, "drain", leaving=leaving):
                self._parts.pauses.close_gate(update)
                await together(map(self._parts.pauses.drained, update.receivers))

    async def _stage_no_more_than_fits(self, update: WeightUpdate, group: TransferGroup, size: int) -> None:
        """Ask for room again where more bytes are announced than the checkpoint has, such as in float32."""
        if update.unstaged or size <= _checkpoint_bytes(group):
            return
        async with self._machine.or_aborted(group.members):
            update.unstaged = await self._why_unstaged(group, size)
        if update.unstaged:
            await self._announce(update, leaving=group.members)

    async def _begin(self, update: WeightUpdate, group: TransferGroup) -> None:
        """Prepare receipts on every engine, and the copy into the store on the scribe. Then, unless it is staged, start
        the update on the engines, which are frozen for that."""
        timeout_s = self._parts.config.control_timeout_s
        scribe = group.scribe
        async with self._machine.step(update, "store", leaving=group.members):
            size = _checkpoint_bytes(group)
            update.draft = (
                await self._parts.snapshots.draft(self._parts.fleet.settled_version, size) if scribe else None
            )
        async with self._machine.step(update, "receipt", leaving=group.members):
            # A restored replica drops its receipt.
            await self._parts.catch_up.settled(group.members, timeout_s)
            copy = self._copy(update, scribe) if scribe and update.draft else None
            await on_all(
                group.members,
                lambda replica: replica.engine.open_receipt(copy if replica is scribe else None, timeout_s),
                timeout_s,
            )
        update.phase = Phase.RECEIVING
        if update.staged:
            return
        async with self._machine.step(update, "pause", leaving=group.members):
            await on_all(group.members, self._parts.pauses.stopping(update), timeout_s)
            update.overwrites = True
            self._parts.fleet.overwrite(group.members, update.version)
            await self._parts.fleet.changes.taken()
        async with self._machine.step(update, "begin", leaving=group.members):
            await on_all(group.members, lambda replica: replica.engine.start_weight_update(timeout_s), timeout_s)

    async def _why_unstaged(self, group: TransferGroup, size: int) -> str:
        """Return "" where all replicas have room for `size` bytes beside their weights, else the reason.

        Under a trainer's pause no rollout gains. A replica of several workers generates with collectives of its own,
        beside which a broadcast may deadlock.
        """
        config, members = self._parts.config, group.members
        if config.stage == "never":
            return "weights.stage is never"
        if self._parts.pauses.is_paused:
            return "the trainer has paused generation"
        if any(one.info.world_size > 1 for one in members):
            return "a replica has several workers"
        timeout_s = config.control_timeout_s
        fits = await on_all(members, lambda replica: replica.engine.room_to_stage(size, timeout_s), timeout_s)
        full = ", ".join(one.replica_id for one, has_room in zip(members, fits, strict=True) if not has_room)
        return f"no room for {size / 1e9:.1f} GB beside the weights of {full}" if full else ""

    async def _transfer(self, update: WeightUpdate, group: TransferGroup, update_info: Json) -> None:
        timeout_s = self._parts.config.transfer_timeout_s

        async def receive(replica: Replica) -> None:
            engine = replica.engine
            await (engine.stage_weights if update.staged else engine.update_weights)(update_info, timeout_s)

        await on_all(group.members, receive, timeout_s)

    def _load(self, update: WeightUpdate) -> Load:
        """Return the call that ends the update on a replica: the swap where it is staged."""
        config = self._parts.config

        async def load(replica: Replica) -> None:
            if update.staged:
                await replica.engine.start_weight_update(config.control_timeout_s)
                await replica.engine.load_staged(config.load_timeout_s)
            await replica.engine.finish_weight_update(update.label, config.control_timeout_s)

        return load

    def _copy(self, update: WeightUpdate, scribe: Replica) -> ReceiptCopy:
        """Return the scribe's instructions."""
        return ReceiptCopy(
            draft=str(update.draft),
            model=scribe.info.model,
            base=self._parts.snapshots.base(self._parts.fleet.version),
            names=tuple(tensor.name for tensor in scribe.info.tensors or ()),
            wait_s=self._parts.config.store_wait_s,
        )

    async def _receipts(self, group: TransferGroup) -> dict[str, str]:
        """Return digests of the received tensors by name. Raise where replicas differ."""
        timeout_s = self._parts.config.control_timeout_s
        received = await on_all(group.members, lambda replica: replica.engine.close_receipt(timeout_s), timeout_s)
        check_receipts(dict(zip(group.members, received, strict=True)))
        return next(filter(None, received), {})

    async def _keep_receipts(self, replicas: Sequence[Replica]) -> None:
        """Have the engines free the weights before, and the scribe finish its copy."""
        await try_on_all(replicas, lambda engine: engine.keep_receipt(self._parts.config.control_timeout_s))

    async def _keep(self, update: WeightUpdate, scribe: Replica | None, digests: dict[str, str]) -> None:
        """Have the store keep the committed version; without a copy of it, only remove older ones."""
        if update.draft is None or scribe is None:
            await self._parts.snapshots.settle(update.version)
            return
        self._parts.snapshots.keep(update.draft, update.label, scribe, digests)


def _reached(findings: Mapping[Replica, Finding]) -> list[Replica]:
    return [replica for replica, finding in findings.items() if finding.result is not Result.LOST]


def _checkpoint_bytes(group: TransferGroup) -> int:
    return max(map(checkpoint_bytes, group.members))
