"""Weight updates as one event for the whole fleet: one coordinator, one update at a time, every step bounded.

    OPEN -> RECEIVING -> VERIFYING -> COMMITTED | ABORTED

Tensors never pass through this process: the trainer's transfer group joins the engines' workers to the trainer.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog

from engines.announcement import check_tensors
from engines.engine import Engine, Json, ReceiptCopy
from engines.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    WeightUpdateConflict,
    WeightUpdateFailed,
)
from engines.types import Dialect, PauseMode, ReplicaState
from gateway.canary import Canary
from gateway.catch_up import CatchUp
from gateway.config import WeightsConfig
from gateway.fleet import Fleet, Replica
from gateway.metrics import Metrics
from gateway.receipts import check_receipts
from gateway.rolling import Rolling
from gateway.scheduler import Scheduler
from gateway.snapshots import Snapshots
from gateway.update_log import UpdateLog
from gateway.verdicts import Finding, Result
from gateway.weight_update import Phase, WeightUpdate, num_bytes

log = structlog.get_logger()

T = TypeVar("T")

_INIT_ROUTE = "/init_weight_transfer_engine"
_UPDATE = "weight update"
_PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """The trainer (rank 0) and the workers of these replicas. Frozen: a member that dies breaks it."""

    members: tuple[Replica, ...]
    transport: str
    opened_at: float = field(default_factory=time.monotonic)

    @property
    def broken_by(self) -> Replica | None:
        gone = (ReplicaState.DRAINING, ReplicaState.LOST)
        return next((replica for replica in self.members if replica.state in gone), None)


class WeightCoordinator:
    """Opens, fills and commits updates on behalf of one trainer at a time."""

    def __init__(
        self, config: WeightsConfig, fleet: Fleet, scheduler: Scheduler, metrics: Metrics, snapshots: Snapshots
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._scheduler = scheduler
        self._metrics = metrics
        self._group: TransferGroup | None = None
        self._update: WeightUpdate | None = None
        self._canary = Canary(config.canary, fleet.models.groups)
        self._paused: PauseMode | None = None
        self._updates = UpdateLog(metrics)
        self._snapshots = snapshots
        self._catch_up = CatchUp(config, fleet, snapshots, self._canary, lambda: self.is_paused)
        self._rolling = Rolling(config, fleet, self._canary, snapshots)
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

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    async def world_size(self) -> int:
        """Workers that a trainer's transfer group must make room for."""
        await self._settled()
        return sum(replica.info.world_size for replica in self._policy())

    async def init(self, init_info: Json) -> None:
        """Join all replicas to the trainer's group. A trainer that starts anew thereby ends what the last one left."""
        async with self._exclusively("init_weight_transfer_engine"):
            await self._abort("a trainer opened a new transfer group")
            await self._close_group()
            await self._catch_up.settled(self._config.init_timeout_s)
            await self._settled()
            members = tuple(replica for replica in self._policy() if replica.info.takes_weights)
            self._check_some_take_weights(members)
            _check_capable(members)
            _check_one_protocol(members)
            _check_reachable(members, init_info)
            ranks = _rank_offsets(members, init_info)
            await self._remember_canary(members)
            with self._timed("init"):
                group = TransferGroup(members, await self._transport_of(members[0]))
                try:
                    await self._on_all(
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

    async def start(self) -> None:
        """Open the next version: hold new rollouts back and let those in flight finish."""
        async with self._exclusively("start_weight_update"):
            group = await self._whole_group()
            self._check_none_open()
            await self._open(WeightUpdate(self._fleet.next_version, group.transport))

    async def load(
        self,
        snapshot: str,
        version: int | None = None,
        canary_logprobs: Sequence[float] | None = None,
        *,
        rolling: bool | None = None,
    ) -> int:
        """Bring all replicas to the version that a trainer wrote into the store. Returns it once they serve it.

        Replicas of all kinds take it together, or one after the other with `rolling`, which is as `weights.rolling`
        says unless given. `version` is the next one unless given.
        """
        async with self._exclusively("v1/weight_updates"):
            self._check_none_open()
            members = await self._loaders()
            update = WeightUpdate(
                self._next_version(version), "store", rolling=self._config.rolling if rolling is None else rolling
            )
            self._canary.check_length(canary_logprobs)
            announced = await self._snapshots.announced(snapshot)
            update.receive(announced)
            await self._take(update, members, snapshot, announced, canary_logprobs)
            return update.version

    async def receive(self, update_info: Json) -> None:
        """Have every replica of the group receive the tensors that the trainer is about to send."""
        async with self._exclusively("update_weights"):
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
                await self._on_all(
                    group.members,
                    lambda replica: replica.engine.update_weights(update_info, self._config.transfer_timeout_s),
                    self._config.transfer_timeout_s,
                )
            update.receive(update_info)

    def canary_token_ids(self) -> list[int]:
        """What a trainer scores with its new weights to have the engines' log-probs compared with its own."""
        members = [replica for replica in self._policy() if replica.info.takes_weights]
        self._check_some_take_weights(members)
        return self._canary.token_ids(members)

    async def finish(self, canary_logprobs: Sequence[float] | None = None) -> int:
        """Commit on every replica, verify, and serve again. Returns the version now served.

        `canary_logprobs` are the trainer's own of `canary_token_ids`, all but the first.
        """
        async with self._exclusively("finish_weight_update"):
            update, group = self._open_update("finish_weight_update"), await self._whole_group()
            if update.phase is Phase.OPEN:
                await self._abort("no tensors were sent")
                return self._fleet.version
            self._canary.check_length(canary_logprobs)
            update.phase = Phase.VERIFYING
            async with self._step(update, "digests"):
                digests = await self._receipts(group)
            async with self._step(update, "commit"):
                timeout_s = self._config.control_timeout_s
                await self._on_all(
                    group.members,
                    lambda replica: replica.engine.finish_weight_update(update.version, timeout_s),
                    timeout_s,
                )
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

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop the policy's generation everywhere; its new rollouts wait in the queue.

        Refused as a whole where a replica that may have rollouts cannot be paused. One that is left behind by the
        fleet's weights has none, and is not asked.
        """
        members = [replica for replica in self._policy() if replica.can_serve or replica.info.has("/pause")]
        for replica in members:
            if not replica.info.has("/pause"):
                raise WeightUpdateConflict(f"replica {replica.replica_id} ({replica.info.url}) has no /pause")
        if self._fleet.rolling_to is not None:
            raise WeightUpdateConflict(
                f"/pause during the rolling update to version {self._fleet.rolling_to}, whose replicas have to answer: "
                "wait for its end"
            )
        self._scheduler.close_gate(_PAUSE)
        self._paused = mode
        timeout_s = self._config.drain_timeout_s if mode is PauseMode.WAIT else self._config.control_timeout_s
        await self._on_all(
            members,
            lambda replica: replica.engine.pause(mode, clear_cache=clear_cache, timeout_s=timeout_s),
            timeout_s,
        )

    async def resume(self) -> None:
        timeout_s = self._config.control_timeout_s
        await self._on_all(self._able("/resume"), lambda replica: replica.engine.resume(timeout_s), timeout_s)
        self._paused = None
        self._scheduler.open_gate(_PAUSE)

    async def reset_prefix_cache(self) -> bool:
        """True when every replica of the policy that can forgot its prefixes.

        Versions never share prefixes, so this only frees memory. A frozen model's prefixes stay as good as they are.
        """
        timeout_s, able = self._config.control_timeout_s, self._able("/reset_prefix_cache")
        return all(await self._on_all(able, lambda replica: replica.engine.reset_prefix_cache(timeout_s), timeout_s))

    async def run(self) -> None:
        """Abort an update whose trainer has gone silent, and bring back replicas that are behind, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_update(), name="watch update")
            tasks.create_task(self._catch_up.run(), name="catch up")

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

    async def _open(self, update: WeightUpdate) -> None:
        """Close the gate and wait for rollouts in flight."""
        self._scheduler.close_gate(_UPDATE)
        self._update = update
        self._fleet.begin(update.version)
        async with self._step(update, "drain"):
            # A paused engine makes no tokens, so there is nothing to wait for: the trainer chose what becomes of
            # rollouts in flight when it chose the mode of the pause.
            if not self.is_paused:
                await self._scheduler.drained(self._config.drain_timeout_s)

    async def _take(
        self,
        update: WeightUpdate,
        members: Sequence[Replica],
        snapshot: str,
        announced: Json,
        canary_logprobs: Sequence[float] | None,
    ) -> None:
        """Have these replicas load a draft of the store, which holds the tensors announced, and serve it together, or,
        where the update is a rolling one, one after the other."""
        for replica in members:
            check_tensors(announced, replica.info, "snapshot")
        await self._remember_canary(members)
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
        members = tuple(replica for replica in self._policy() if replica.info.loads_snapshots)
        if not members:
            there = _names(self._policy()) or "nobody, see /health"
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
        if self.is_paused:
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

    async def _load_all(self, update: WeightUpdate, members: Sequence[Replica], snapshot: str) -> tuple[Replica, ...]:
        """Those that hold the draft's weights then. One that dies on the way costs the others nothing."""
        path = await self._promote(update, members, snapshot)
        await self._overwrite(update, members)
        timeout_s = self._config.load_timeout_s

        async def load(replica: Replica) -> None:
            await replica.engine.load_snapshot(str(path), update.version, timeout_s)

        return await self._on_living(members, load, timeout_s)

    async def _overwrite(self, update: WeightUpdate, members: Sequence[Replica]) -> None:
        """From here on engines are overwritten: none of them counts as holding any version until the commit."""
        await self._catch_up.settled(self._config.control_timeout_s)
        update.phase = Phase.RECEIVING
        for replica in members:
            replica.weight_version = None
            self._fleet.set_state(replica, ReplicaState.UPDATING, f"update to version {update.version}")

    def _holders(self, version: int) -> list[str]:
        return [replica.info.incarnation for replica in self._fleet.policy if replica.weight_version == version]

    async def _begin(self, update: WeightUpdate, group: TransferGroup) -> None:
        """Have every engine start its update, and one of them copy it into the store."""
        scribe = next((replica for replica in group.members if replica.info.has_tee), None)
        size = max(map(_checkpoint_bytes, group.members))
        update.draft = await self._snapshots.draft(self._fleet.version, size) if scribe else None
        await self._overwrite(update, group.members)
        timeout_s = self._config.control_timeout_s
        copy = self._copy(update, scribe) if scribe and update.draft else None
        await self._on_all(
            group.members,
            lambda replica: replica.engine.open_receipt(copy if replica is scribe else None, timeout_s),
            timeout_s,
        )
        await self._on_all(group.members, lambda replica: replica.engine.start_weight_update(timeout_s), timeout_s)

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
        told = await self._on_all(group.members, lambda replica: replica.engine.close_receipt(timeout_s), timeout_s)
        check_receipts(dict(zip(group.members, told, strict=True)))
        return next(filter(None, told), {})

    async def _keep(self, update: WeightUpdate, digests: dict[str, str]) -> None:
        """Have the store keep the version just committed, or at least forget those that nobody needs."""
        if update.draft is None:
            await self._snapshots.settle(update.version)
            return
        self._snapshots.keep(update.draft, update.version, self._holders(update.version), digests)

    async def _remember_canary(self, members: Sequence[Replica]) -> None:
        """What the canary says before the first update. A paused engine answers nothing, and is asked another time."""
        if self._canary.is_enabled and not self.is_paused:
            await self._canary.remember(members)

    async def _verify(
        self, update: WeightUpdate, members: Sequence[Replica], canary_logprobs: Sequence[float] | None
    ) -> dict[Replica, Finding]:
        """Canary findings of all members. Raises `WeightUpdateFailed` where too many fail for the policy."""
        if not self._canary.is_enabled:
            return {}
        async with self._answering(members):
            findings = await self._canary.check(members, update.version, trainers=canary_logprobs, busy=self.is_paused)
        for replica, finding in findings.items():
            update.replicas[replica.replica_id] = {"canary": finding.report()}
        self._check_policy(findings)
        return findings

    @asynccontextmanager
    async def _answering(self, members: Sequence[Replica]) -> AsyncIterator[None]:
        """A paused engine answers nothing. So it goes on for the moment of the question, with its new weights.

        The gate stays closed, and what ends meanwhile is held back until the update is over (`Replica.vouched`).
        """
        if not self.is_paused:
            yield
            return
        timeout_s = self._config.control_timeout_s
        await self._try_on_all(members, lambda engine: engine.resume(timeout_s))
        try:
            yield
        finally:
            await self._try_on_all(
                members, lambda engine: engine.pause(PauseMode.KEEP, clear_cache=False, timeout_s=timeout_s)
            )

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
                replica.weight_version = update.version
        for replica, finding in fenced.items():
            self._fleet.fence(replica, f"fenced at version {update.version}: {finding.reason}")
        for replica in self._policy():
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
        updating = [replica for replica in self._policy() if replica.state is ReplicaState.UPDATING]
        overwritten = [replica for replica in updating if replica.weight_version is None]
        for replica in overwritten:
            self._fleet.fence(replica, f"update to version {update.version} aborted: {reason}")
        ahead = [replica for replica in self._policy() if replica.weight_version == update.version]
        self._end(update, [*overwritten, *ahead], Phase.ABORTED, reason)
        left = members if leaves_group else overwritten
        self._catch_up.restore((r for r in left if r.state is not ReplicaState.LOST), leaves_group=leaves_group)
        if update.rolling:
            self._catch_up.take_back(ahead, self._config.rolling_width)
            for replica in updating:
                self._fleet.settle(replica, f"serves on: the update to version {update.version} was aborted")
        await self._snapshots.discard(update.draft)

    def _end(self, update: WeightUpdate, members: Sequence[Replica], phase: Phase, error: str = "") -> None:
        for replica in members:
            found = update.replicas.setdefault(replica.replica_id, {})
            found |= {"state": replica.state.value, "weight_version": replica.weight_version}
        update.end(phase, error)
        self._update = self._fleet.update_to = None
        self._updates.add(update)
        self._scheduler.open_gate(_UPDATE)

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

    def _policy(self) -> list[Replica]:
        """The replicas that are updated and paused. Raises `WeightUpdateConflict` where all models are frozen."""
        if self._fleet.models.all_frozen:
            raise WeightUpdateConflict(
                f"every model here is frozen ({', '.join(self._fleet.models.names)}), so there is nothing to update or "
                "pause: an engine group that is not frozen is the policy"
            )
        return [replica for replica in self._fleet.policy if replica.is_alive]

    def _able(self, route: str) -> list[Replica]:
        """Those of the policy that serve `route`. Raises `WeightUpdateConflict` where some are there, but none does."""
        alive = self._policy()
        able = [replica for replica in alive if replica.info.has(route)]
        if alive and not able:
            raise WeightUpdateConflict(f"no replica has {route}: {_names(alive)}")
        return able

    def _check_some_take_weights(self, members: Sequence[Replica]) -> None:
        if not members and (alive := self._policy()):
            raise WeightUpdateConflict(
                f"no replica of the policy takes weights: {_names(alive)}; a vLLM server takes them when it is started "
                "with --weight-transfer-config and VLLM_SERVER_DEV_MODE=1"
            )

    async def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await self._leave(group.members)

    async def _leave(self, members: Sequence[Replica]) -> None:
        await self._try_on_all(members, lambda engine: engine.close_weight_group(self._config.control_timeout_s))

    async def _try_on_all(self, replicas: Sequence[Replica], call: Callable[[Engine], Awaitable[None]]) -> None:
        """Where one that cannot take part is found out by other means: by its probes, or by the canary."""
        results = await asyncio.gather(*(call(replica.engine) for replica in replicas), return_exceptions=True)
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, Exception):
                log.warning("left out of a call", replica=replica.replica_id, error=str(result))

    async def _on_all(
        self, replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[T]], timeout_s: float
    ) -> list[T]:
        """The call on all replicas at once. The first failure ends the wait for the others and names its replica."""
        if not replicas:
            raise WeightUpdateFailed("no replica is there to take the call: see /health")
        return await _together(self._on_one(replica, call, timeout_s) for replica in replicas)

    async def _on_living(
        self, replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[None]], timeout_s: float
    ) -> tuple[Replica, ...]:
        """The call on all replicas at once; those on which it came through. One that dies under it is left out."""

        async def on_one(replica: Replica) -> Replica | None:
            try:
                await self._on_one(replica, call, timeout_s)
            except WeightUpdateFailed as error:
                if not await self._is_dead(replica):
                    raise
                log.warning("the update goes on without a replica that died", error=str(error))
                return None
            return replica

        living = tuple(filter(None, await _together(on_one(replica) for replica in replicas)))
        if not living:
            raise WeightUpdateFailed(f"every replica died under the call: {_names(replicas)}")
        return living

    async def _is_dead(self, replica: Replica) -> bool:
        """Whether a replica that failed has ended, or wedged, and has not just refused."""
        if replica.state is ReplicaState.LOST:
            return True
        try:
            await replica.engine.health(self._config.control_timeout_s)
        except (EngineError, DeadlineExceeded):
            return True
        return False

    async def _on_one(self, replica: Replica, call: Callable[[Replica], Awaitable[T]], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await replica.unless_lost(call(replica))
        except EngineError as error:
            raise WeightUpdateFailed(str(error), replica_id=replica.replica_id) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"replica {replica.replica_id} did not answer within {timeout_s:g} s") from error

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


async def _together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of calls made at once. The first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except* (WeightUpdateFailed, DeadlineExceeded) as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]


def _checkpoint_bytes(replica: Replica) -> int:
    """0 where its checkpoint cannot be read."""
    tensors = replica.info.tensors or ()
    return num_bytes({"dtype_names": [one.dtype for one in tensors], "shapes": [one.shape for one in tensors]})


def _names(replicas: Sequence[Replica]) -> str:
    return ", ".join(f"{replica.replica_id} ({replica.info.kind} at {replica.info.url})" for replica in replicas)


def _check_capable(members: Sequence[Replica]) -> None:
    for replica in members:
        if _INIT_ROUTE not in replica.info.capabilities:
            engine = f"{replica.info.kind} {replica.info.engine_version}"
            raise WeightUpdateConflict(
                f"replica {replica.replica_id} ({engine}) has no {_INIT_ROUTE}: its engine must be started with "
                "a weight transfer backend and VLLM_SERVER_DEV_MODE=1"
            )


def _check_one_protocol(members: Sequence[Replica]) -> None:
    """vLLM's receivers open communicators of their own, SGLang's a process group of torch's: together both hang."""
    sglang = [replica for replica in members if replica.info.dialect is Dialect.SGLANG]
    others = [replica for replica in members if replica not in sglang]
    if sglang and others:
        raise WeightUpdateConflict(
            f"replicas of SGLang ({sglang[0].replica_id}) and of vLLM ({others[0].replica_id}) cannot be in one "
            "transfer group: serve the policy with engines of one kind where its weights are updated"
        )


def _check_reachable(members: Sequence[Replica], init_info: Json) -> None:
    """An engine elsewhere would look for the trainer on its own machine, until the rendezvous runs out."""
    address = str(init_info.get("master_address"))
    away = next((replica for replica in members if not _is_loopback(urlsplit(replica.info.url).hostname or "")), None)
    if away is not None and _is_loopback(address):
        raise WeightUpdateConflict(
            f"init_info.master_address is {address!r}, where replica {away.replica_id} ({away.info.url}) cannot find "
            "the trainer: give the address of the trainer that engines reach, such as WeightSender(address=...)"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which leads somewhere


def _rank_offsets(members: Sequence[Replica], init_info: Json) -> dict[Replica, int]:
    """First rank of each replica's workers: the trainer's own offset, then one replica after the other."""
    workers = sum(replica.info.world_size for replica in members)
    if not members:
        raise WeightUpdateConflict("no replica is there to join a transfer group: see /health")
    if init_info.get("world_size") != workers + 1:
        raise WeightUpdateConflict(
            f"init_info.world_size is {init_info.get('world_size')!r}, but the fleet has {workers} workers now, so the "
            f"group needs {workers + 1}: ask /get_world_size again"
        )
    offsets, rank = {}, init_info.get("rank_offset", 1)
    for replica in members:
        offsets[replica] = rank
        rank += replica.info.world_size
    return offsets
