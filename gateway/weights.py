"""Weight updates as one event for the whole fleet: one coordinator, one update at a time, every step bounded.

    OPEN -> RECEIVING -> VERIFYING -> COMMITTED | ABORTED

Tensors never pass through this process: the trainer's transfer group joins the engines' workers to the trainer, or the
relay, from which they go through the store.
"""

import asyncio
import importlib.util
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from engines.announcement import check_fused, check_tensors
from engines.engine import Json, ReceiptCopy
from engines.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    RolloutGatewayError,
    WeightUpdateConflict,
    WeightUpdateFailed,
)
from engines.types import Dialect, InFlight, ReplicaState
from gateway.canary import Canary
from gateway.catch_up import CatchUp
from gateway.config import WeightsConfig
from gateway.fleet import Fleet, Replica
from gateway.generation import Generation, policy
from gateway.metrics import Metrics
from gateway.receipts import check_receipts
from gateway.relay import TRANSPORT as RELAY
from gateway.relay import WORLD_SIZE as RELAY_WORLD_SIZE
from gateway.relay import Relay
from gateway.replica_calls import names, on_all, on_living, try_on_all
from gateway.rolling import Rolling
from gateway.scheduler import Scheduler
from gateway.snapshots import Snapshots
from gateway.transfer_group import (
    TransferGroup,
    check_capable,
    check_one_protocol,
    check_reachable,
    check_world_size,
    rank_offsets,
)
from gateway.update_log import UpdateLog
from gateway.verdicts import Finding, Result
from gateway.weight_update import Phase, WeightUpdate, num_bytes

log = structlog.get_logger()


class WeightCoordinator:
    """Opens, fills and commits updates on behalf of one trainer at a time."""

    def __init__(
        self, config: WeightsConfig, fleet: Fleet, scheduler: Scheduler, metrics: Metrics, snapshots: Snapshots
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._metrics = metrics
        self._group: TransferGroup | None = None
        self._update: WeightUpdate | None = None
        self._canary = Canary(config.canary, fleet.models.groups)
        self.generation = Generation(config, fleet, scheduler)
        self._updates = UpdateLog(metrics)
        self._snapshots = snapshots
        self._catch_up = CatchUp(config, fleet, snapshots, self._canary, lambda: self.generation.is_paused)
        self._rolling = Rolling(config, fleet, self._canary, snapshots)
        self._relay = Relay(config, _log_dir(fleet))
        self._busy_with = ""
        fleet.on_change(lambda: metrics.observe_versions(fleet.version, fleet.serving_behind))

    @property
    def update(self) -> WeightUpdate | None:
        """The update in progress, if any."""
        return self._update

    @property
    def updates(self) -> UpdateLog:
        """The updates that have ended."""
        return self._updates

    async def world_size(self) -> int:
        """Workers that a trainer's transfer group must make room for."""
        await self._settled()
        if not await self._why_flat():
            return RELAY_WORLD_SIZE
        return sum(replica.info.world_size for replica in policy(self._fleet))

    async def backend(self) -> str | None:
        """What trainers send over, in the word of vLLM's weight transfer; None where the engines say it themselves."""
        if self._fleet.models.all_frozen or await self._why_flat():
            return None
        return self._relay.backend

    def relay_report(self) -> Json:
        return {"mode": self._config.relay, **self._relay.report()}

    async def init(self, init_info: Json) -> None:
        """Open a trainer's group. A trainer that starts anew thereby ends what the last one left."""
        async with self._exclusively("init_weight_transfer_engine"):
            await self._abort("a trainer opened a new transfer group")
            await self._close_group()
            await self._settled()
            if why := await self._why_flat():
                log.info("flat transfer group", reason=why)
                await self._relay.close()
                await self._init_flat(init_info)
            else:
                await self._init_relay(init_info)

    async def start(self, in_flight: InFlight | None = None) -> None:
        """Open the next version. No engine is touched yet; `in_flight: drain` waits for rollouts in flight."""
        async with self._exclusively("start_weight_update"):
            if self._relay.is_open:
                self._check_none_open()
                await self._start_on_relay(in_flight)
                return
            group = await self._whole_group()
            self._check_none_open()
            in_flight = self.generation.in_flight(group.members, in_flight)
            await self._open(WeightUpdate(self._fleet.next_version, group.transport, in_flight))

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
            self._check_none_open()
            members = await self._loaders()
            rolling = self._config.rolling if rolling is None else rolling
            in_flight = self.generation.in_flight(members, in_flight)
            update = WeightUpdate(self._next_version(version), "store", in_flight, rolling=rolling)
            self._canary.check_length(canary_logprobs)
            announced = await self._snapshots.announced(snapshot)
            update.receive(announced)
            await self._check_fits(announced, members)
            await self._take(update, members, snapshot, canary_logprobs)
            return update.version

    async def receive(self, update_info: Json) -> None:
        """Have every replica of the group, or the relay, receive the tensors that the trainer is about to send."""
        async with self._exclusively("update_weights"):
            if self._relay.is_open:
                await self._receive_on_relay(update_info)
                return
            update, group = self._open_update("update_weights"), await self._whole_group()
            try:
                for replica in group.members:
                    check_tensors(update_info, replica.info, "update_info")
            except InvalidRequest as error:
                # The trainer may already sit in its broadcast: leaving the group is what lets it go.
                await self._abort(str(error))
                await self._close_group()
                raise
            async with self._step(update, "transfer", leaves_group=True):
                if update.phase is Phase.OPEN:
                    await self._begin(update, group)
                await on_all(
                    group.members,
                    lambda replica: replica.engine.update_weights(update_info, self._config.transfer_timeout_s),
                    self._config.transfer_timeout_s,
                )
            update.receive(update_info)

    def canary_token_ids(self) -> list[int]:
        """What a trainer scores with its new weights to have the engines' log-probs compared with its own."""
        members = [replica for replica in policy(self._fleet) if replica.info.takes_weights]
        self._check_some_take_weights(members)
        return self._canary.token_ids(members)

    async def finish(self, canary_logprobs: Sequence[float] | None = None) -> int:
        """Commit on every replica, verify, and serve again. Returns the version now served.

        `canary_logprobs` are the trainer's own of `canary_token_ids`, all but the first.
        """
        async with self._exclusively("finish_weight_update"):
            if self._relay.is_open:
                return await self._finish_on_relay(canary_logprobs)
            update, group = self._open_update("finish_weight_update"), await self._whole_group()
            if update.phase is Phase.OPEN:
                await self._abort("no tensors were sent")
                return self._fleet.version
            self._canary.check_length(canary_logprobs)
            update.phase = Phase.VERIFYING
            async with self._step(update, "digests"):
                for replica in group.members:
                    if replica.info.dialect is Dialect.VLLM:
                        check_fused(update.names, replica.info)
                digests = await self._receipts(group)
            async with self._step(update, "commit"):
                timeout_s = self._config.control_timeout_s
                await on_all(
                    group.members,
                    lambda replica: replica.engine.finish_weight_update(update.version, timeout_s),
                    timeout_s,
                )
                await self.generation.thaw(update)
            async with self._step(update, "canary"):
                findings = await self._verify(update, group.members, canary_logprobs)
            self._commit(update, group.members, findings)
            await self._keep(update, digests)
            return update.version

    async def abandon(self, reason: str) -> None:
        """End the open update, if any, and close its group: the trainer begins anew."""
        async with self._exclusively("v1/weight_updates"):
            if self._update is not None:
                await self._abort(reason)
                await self._close_group()

    async def run(self) -> None:
        """Abort an update whose trainer has gone silent, and bring back replicas that are behind, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_update(), name="watch update")
                tasks.create_task(self._catch_up.run(), name="catch up")
        finally:
            await self._relay.close()

    async def _watch_update(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._config.idle_timeout_s / 4))
            update = self._update
            if update is None or self._busy_with:
                continue
            if time.monotonic() - update.touched_at > self._config.idle_timeout_s:
                async with self._exclusively("idle watch"):
                    await self._abort(f"no word from the trainer for {self._config.idle_timeout_s:g} s")

    @asynccontextmanager
    async def _step(self, update: WeightUpdate, name: str, *, leaves_group: bool = False) -> AsyncIterator[None]:
        """A step of the update, timed. Where it fails the update is aborted."""
        try:
            with update.timed(name):
                yield
        except BaseException as error:
            await self._abort(str(error) or type(error).__name__, leaves_group=leaves_group)
            raise

    def _check_none_open(self) -> None:
        if self._update is not None:
            raise WeightUpdateConflict(
                f"update to version {self._update.version} is open since {self._update.age_s:.1f} s: finish it, or "
                "call /init_weight_transfer_engine to abort it"
            )

    async def _init_flat(self, init_info: Json) -> None:
        """Join all replicas to the trainer's group."""
        await self._catch_up.settled(self._config.init_timeout_s)
        members = tuple(replica for replica in policy(self._fleet) if replica.info.takes_weights)
        self._check_some_take_weights(members)
        check_capable(members)
        check_one_protocol(members)
        check_reachable(members, init_info)
        ranks = rank_offsets(members, init_info)
        await self._remember_canary(members)
        with self._timed("init"):
            group = TransferGroup(members, await self._transport_of(members[0]))
            try:
                await on_all(
                    members,
                    lambda replica: replica.engine.open_weight_group(
                        {**init_info, "rank_offset": ranks[replica]}, self._config.init_timeout_s
                    ),
                    self._config.init_timeout_s,
                )
            except BaseException:
                await self._leave(members)
                raise
        self._group = group
        log.info("transfer group open", replicas=[member.replica_id for member in members])

    async def _init_relay(self, init_info: Json) -> None:
        """Join the relay to the trainer's group."""
        await self._loaders()
        check_world_size(init_info, RELAY_WORLD_SIZE, "the relay receives for all replicas")
        with self._timed("init"):
            await self._relay.open(init_info)
        log.info("transfer group open", relay=self._relay.report()["pid"])

    async def _start_on_relay(self, in_flight: InFlight | None) -> None:
        """No replica is asked anything yet: they serve on until they load."""
        members = await self._loaders()
        in_flight = self.generation.in_flight(members, in_flight)
        draft = await self._snapshots.claim(self._fleet.version, max(map(_checkpoint_bytes, members)))
        try:
            await self._relay.begin(draft, members[0].info.model)
        except BaseException:
            await self._snapshots.discard(draft)
            raise
        self._update = WeightUpdate(self._fleet.next_version, RELAY, in_flight, draft=draft)

    async def _receive_on_relay(self, update_info: Json) -> None:
        try:
            update = self._open_update("update_weights")
            for replica in await self._loaders():
                check_tensors(update_info, replica.info, "update_info")
        except RolloutGatewayError as error:
            await self._abort(str(error))
            await self._let_go(update_info)
            raise
        async with self._step(update, "transfer"):
            update.phase = Phase.RECEIVING
            await self._relay.receive(update_info)
        update.receive(update_info)

    async def _let_go(self, update_info: Json) -> None:
        """Take what a trainer sends whose announcement was refused: it may already sit in its broadcast."""
        try:
            await self._relay.receive(update_info)
        except RolloutGatewayError as error:
            log.warning("the relay has ended, which lets a refused trainer go", error=str(error))

    async def _finish_on_relay(self, canary_logprobs: Sequence[float] | None) -> int:
        update = self._open_update("finish_weight_update")
        if update.phase is Phase.OPEN or update.draft is None:
            await self._abort("no tensors were sent")
            return self._fleet.version
        self._canary.check_length(canary_logprobs)
        async with self._step(update, "store"):
            await self._relay.end()
            announced = await self._snapshots.finished(update.draft)
            members = await self._loaders()
            await self._check_fits(announced, members)
        # Nobody generates under a pause, so that rolling would keep nothing up.
        update.rolling = self._config.rolling and not self.generation.is_paused
        await self._take(update, members, update.draft.name, canary_logprobs)
        return update.version

    async def _why_flat(self) -> str:
        """Why a trainer gets a group of all workers; empty where it gets one of itself and the relay."""
        if self._config.relay != "auto":
            return "" if self._config.relay == "always" else "weights.relay is never"
        members = [replica for replica in policy(self._fleet) if replica.info.takes_weights]
        vllm = next((replica for replica in members if replica.info.dialect is Dialect.VLLM), None)
        if vllm is None:
            return "no replica is a vLLM, whose trainers the relay understands"
        is_mixed = any(replica.info.dialect is not Dialect.VLLM for replica in members)
        if not is_mixed and max(len(members), self._fleet.expected_of_policy) == 1:
            return "there is one replica"
        if not all(replica.info.loads_snapshots for replica in members):
            return "not every replica can load weights from a folder"
        if (backend := await self._transport_of(vllm)) != self._relay.backend:
            return f"engines receive over {backend}, the relay over {self._relay.backend} (weights.relay_device)"
        needed = "vllm" if self._config.relay_device else "torch"
        if importlib.util.find_spec(needed) is None:
            return f"the gateway's Python, which runs the relay, has no {needed}"
        return await self._snapshots.why_not(max(map(_checkpoint_bytes, members)))

    async def _open(self, update: WeightUpdate) -> None:
        """Announce the version; where rollouts in flight are to finish first, close the gate and wait for them."""
        self._update = update
        self._fleet.begin(update.version)
        # A paused engine makes no tokens, so there is nothing to wait for: the trainer chose what becomes of rollouts
        # in flight when it chose the mode of the pause.
        if update.in_flight is InFlight.DRAIN and not self.generation.is_paused:
            async with self._step(update, "drain"):
                await self.generation.drain()

    async def _take(
        self,
        update: WeightUpdate,
        members: Sequence[Replica],
        snapshot: str,
        canary_logprobs: Sequence[float] | None,
    ) -> None:
        """Have these replicas load a draft of the store and serve it together, or, where the update is a rolling one,
        one after the other."""
        bring = self._roll if update.rolling else self._load_at_once
        try:
            members, findings = await bring(update, members, snapshot, canary_logprobs)
        except BaseException:
            await self._snapshots.withdraw(update.version)
            raise
        self._commit(update, members, findings)
        await self._snapshots.note_holders(update.version, self._holders(update.version))
        await self._snapshots.settle(update.version)

    async def _loaders(self) -> tuple[Replica, ...]:
        """The replicas that load from the store."""
        await self._settled()
        members = tuple(replica for replica in policy(self._fleet) if replica.info.loads_snapshots)
        if not members:
            there = names(policy(self._fleet)) or "nobody, see /health"
            raise WeightUpdateConflict(f"no replica can load weights from a folder; there is {there}")
        return members

    def _next_version(self, asked: int | None) -> int:
        if asked is not None and asked < self._fleet.next_version:
            raise WeightUpdateConflict(
                f"version = {asked}, but the fleet is at {self._fleet.version}, the next is "
                f"{self._fleet.next_version}, and versions only grow: leave it out"
            )
        return asked or self._fleet.next_version

    async def _load_at_once(
        self,
        update: WeightUpdate,
        members: Sequence[Replica],
        snapshot: str,
        canary_logprobs: Sequence[float] | None,
    ) -> tuple[Sequence[Replica], dict[Replica, Finding]]:
        """Those that hold the draft's weights then, and what the canary found of them."""
        await self._open(update)
        async with self._step(update, "load"):
            members = await self._load_all(update, members, snapshot)
            await self.generation.thaw(update)
        update.phase = Phase.VERIFYING
        async with self._step(update, "canary"):
            findings = await self._verify(update, members, canary_logprobs)
        return members, findings

    async def _roll(
        self,
        update: WeightUpdate,
        members: Sequence[Replica],
        snapshot: str,
        canary_logprobs: Sequence[float] | None,
    ) -> tuple[Sequence[Replica], dict[Replica, Finding]]:
        """The same, one replica after the other and with the gate open."""
        if self.generation.is_paused:
            raise WeightUpdateConflict(
                "generation is paused, and in a rolling update replicas go on generating: /resume first, or push "
                "without rolling"
            )
        await self._catch_up.settled(self._config.load_timeout_s)
        if not any(replica.can_serve for replica in members):
            raise WeightUpdateConflict("no replica serves, so there is nothing to roll: push without rolling")
        self._update, update.phase = update, Phase.ROLLING
        self._fleet.begin(update.version, rolling=True)
        try:
            path = await self._promote(update, members, snapshot)
            findings = await self._rolling.take(update, path, canary_logprobs)
        except BaseException as error:
            await self._abort(str(error) or type(error).__name__)
            raise
        there = {replica: one for replica, one in findings.items() if one.result is not Result.LOST}
        return list(there), there

    async def _promote(self, update: WeightUpdate, members: Sequence[Replica], snapshot: str) -> Path:
        names = {tensor.name for replica in members for tensor in replica.info.tensors or ()}
        return await self._snapshots.promote(snapshot, update.version, self._fleet.version, names)

    async def _check_fits(self, announced: Json, members: Sequence[Replica]) -> None:
        """Raise where a draft's tensors are not the model's, and see what replicas say before they load it."""
        for replica in members:
            check_tensors(announced, replica.info, "snapshot")
        await self._remember_canary(members)

    async def _load_all(self, update: WeightUpdate, members: Sequence[Replica], snapshot: str) -> tuple[Replica, ...]:
        """Those that hold the draft's weights then. One that dies on the way costs the others nothing."""
        path = await self._promote(update, members, snapshot)
        await self._overwrite(update, members)
        timeout_s = self._config.load_timeout_s

        async def load(replica: Replica) -> None:
            await replica.engine.load_snapshot(str(path), update.version, timeout_s)

        return await on_living(members, load, timeout_s)

    async def _overwrite(self, update: WeightUpdate, members: Sequence[Replica]) -> None:
        """From here on engines are overwritten: none of them counts as holding any version until the commit."""
        await self._catch_up.settled(self._config.control_timeout_s)
        await self.generation.freeze(update, members)
        update.phase = Phase.RECEIVING
        for replica in members:
            if replica.state is ReplicaState.LOST:
                continue  # whoever calls it next finds out
            replica.weight_version = None
            self._fleet.set_state(replica, ReplicaState.UPDATING, f"update to version {update.version}")
        await self._snapshots.note_overwritten(members)

    def _holders(self, version: int) -> list[Replica]:
        return [replica for replica in self._fleet.policy if replica.weight_version == version]

    async def _begin(self, update: WeightUpdate, group: TransferGroup) -> None:
        """Have every engine start its update, and one of them copy it into the store."""
        scribe = next((replica for replica in group.members if replica.info.has_tee), None)
        size = max(map(_checkpoint_bytes, group.members))
        update.draft = await self._snapshots.draft(self._fleet.version, size) if scribe else None
        await self._overwrite(update, group.members)
        timeout_s = self._config.control_timeout_s
        copy = self._copy(update, scribe) if scribe and update.draft else None
        await on_all(
            group.members,
            lambda replica: replica.engine.open_receipt(copy if replica is scribe else None, timeout_s),
            timeout_s,
        )
        await on_all(group.members, lambda replica: replica.engine.start_weight_update(timeout_s), timeout_s)

    def _copy(self, update: WeightUpdate, scribe: Replica) -> ReceiptCopy:
        """What the replica that writes the version down has to know."""
        return ReceiptCopy(
            draft=str(update.draft),
            model=scribe.info.model,
            base=self._snapshots.base(self._fleet.version),
            names=tuple(tensor.name for tensor in scribe.info.tensors or ()),
            wait_s=self._config.store_wait_s,
        )

    async def _receipts(self, group: TransferGroup) -> dict[str, str]:
        """Digests of the tensors received, by name, once all replicas agree on them."""
        timeout_s = self._config.control_timeout_s
        told = await on_all(group.members, lambda replica: replica.engine.close_receipt(timeout_s), timeout_s)
        check_receipts(dict(zip(group.members, told, strict=True)))
        return next(filter(None, told), {})

    async def _keep(self, update: WeightUpdate, digests: dict[str, str]) -> None:
        """Have the store keep the version just committed, or at least forget those that nobody needs."""
        await self._snapshots.note_holders(update.version, self._holders(update.version))
        if update.draft is None:
            await self._snapshots.settle(update.version)
            return
        self._snapshots.keep(update.draft, update.version, self._holders(update.version), digests)

    async def _remember_canary(self, members: Sequence[Replica]) -> None:
        """What the canary says before the first update. A paused engine answers nothing, and is asked another time."""
        if self._canary.is_enabled and not self.generation.is_paused:
            await self._canary.remember(members)

    async def _verify(
        self, update: WeightUpdate, members: Sequence[Replica], canary_logprobs: Sequence[float] | None
    ) -> dict[Replica, Finding]:
        """Canary findings of all members. Raises `WeightUpdateFailed` where too many fail for the policy."""
        if not self._canary.is_enabled:
            return {}
        async with self.generation.answering(members):
            findings = await self._canary.check(
                members,
                update.version,
                trainers=canary_logprobs,
                busy=any(not replica.idle.is_set() for replica in members),
            )
        for replica, finding in findings.items():
            update.replicas[replica.replica_id] = {"canary": finding.report()}
        self._check_policy(findings)
        return findings

    def _check_policy(self, findings: dict[Replica, Finding]) -> None:
        failed = {replica: finding for replica, finding in findings.items() if finding.result is Result.FAILED}
        passed = sum(finding.may_serve for finding in findings.values())
        needed = math.ceil(self._config.quorum * len(findings)) if self._config.policy == "quorum" else 1
        if (not failed or self._config.policy == "quorum") and passed >= max(needed, 1):
            return
        replica, finding = next(iter((failed or findings).items()))
        raise WeightUpdateFailed(
            f"{len(findings) - passed} of {len(findings)} replicas failed the canary (weights.policy: "
            f"{self._config.policy}); replica {replica.replica_id}: {finding.reason}",
            replica_id=replica.replica_id,
        )

    def _commit(self, update: WeightUpdate, members: Sequence[Replica], findings: dict[Replica, Finding]) -> None:
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

    async def _abort(self, reason: str, *, leaves_group: bool = False) -> None:
        """End the open update, if any. Replicas that were being overwritten hold no known version and do not serve
        until they are back at the fleet's, which happens beside this. The group is given up with `leaves_group`."""
        members = self._group.members if self._group else ()
        if leaves_group:
            self._group = None
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
        left = members if leaves_group else overwritten
        self._catch_up.restore((r for r in left if r.state is not ReplicaState.LOST), leaves_group=leaves_group)
        if update.rolling:
            self._catch_up.take_back(ahead, self._config.rolling_width)
            for replica in updating:
                self._fleet.settle(replica, f"serves on: the update to version {update.version} was aborted")
        if self._relay.is_open:
            await self._drop_relayed()
        await self.generation.thaw_untouched()
        await self._snapshots.discard(update.draft)

    async def _drop_relayed(self) -> None:
        try:
            await self._relay.drop()
        except RolloutGatewayError as error:
            log.warning("the relay has ended", error=str(error))

    def _end(self, update: WeightUpdate, members: Sequence[Replica], phase: Phase, error: str = "") -> None:
        for replica in members:
            found = update.replicas.setdefault(replica.replica_id, {})
            found |= {"state": replica.state.value, "weight_version": replica.weight_version}
        update.end(phase, error)
        self._update = self._fleet.update_to = None
        self._updates.add(update)
        self.generation.end()

    async def _transport_of(self, replica: Replica) -> str:
        """What moves the tensors, in the word of the engine's weight transfer backend."""
        try:
            info = await replica.engine.ask(
                "GET", "/server_info?config_format=json", None, self._config.control_timeout_s
            )
            return str(info["vllm_config"]["weight_transfer_config"]["backend"])
        except (EngineError, DeadlineExceeded, KeyError, TypeError):
            return "unknown"  # a server that tells nothing of itself may still take weights

    def _open_update(self, call: str) -> WeightUpdate:
        if self._update is None:
            raise WeightUpdateConflict(f"/{call} without an open update: call /start_weight_update first")
        return self._update

    async def _settled(self) -> None:
        """A probe that came late on a busy machine must neither break a group nor leave a replica out of one."""
        try:
            async with asyncio.timeout(self._config.control_timeout_s):
                await self._fleet.settled()
        except TimeoutError:
            log.warning("a replica stays SUSPECT", seconds=self._config.control_timeout_s)

    async def _whole_group(self) -> TransferGroup:
        """The open group. An update whose group has lost a member is over, whichever call finds out."""
        group = self._group
        if group is None:
            raise WeightUpdateConflict("there is no transfer group: call /init_weight_transfer_engine first")
        await self._settled()
        if (gone := group.broken_by) is not None:
            error = WeightUpdateFailed(
                f"the transfer group is broken: replica {gone.replica_id} left it ({gone.state}: {gone.reason}); call "
                "/init_weight_transfer_engine to form a new group",
                replica_id=gone.replica_id,
            )
            await self._abort(str(error))
            raise error
        return group

    def _check_some_take_weights(self, members: Sequence[Replica]) -> None:
        if not members and (alive := policy(self._fleet)):
            raise WeightUpdateConflict(
                f"no replica of the policy takes weights: {names(alive)}; a vLLM server takes them when it is started "
                "with --weight-transfer-config and VLLM_SERVER_DEV_MODE=1"
            )

    async def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await self._leave(group.members)

    async def _leave(self, members: Sequence[Replica]) -> None:
        await try_on_all(members, lambda engine: engine.close_weight_group(self._config.control_timeout_s))

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
            if self._update is not None:
                self._update.touched_at = time.monotonic()

    def _timed(self, step: str) -> Any:
        return self._metrics.weight_update_seconds.labels(step).time()


def _log_dir(fleet: Fleet) -> str:
    """Where the policy's engines have their logs."""
    groups = fleet.models.groups.values()
    return next((group.log_dir for group in groups if not group.frozen), next(iter(groups)).log_dir)


def _checkpoint_bytes(replica: Replica) -> int:
    """0 where its checkpoint cannot be read."""
    tensors = replica.info.tensors or ()
    return num_bytes({"dtype_names": [one.dtype for one in tensors], "shapes": [one.shape for one in tensors]})
