"""Brings replicas to the fleet's weights, in one way: end the update in the engine, load the version, verify, label,
serve.

A replica is behind when it is SYNCING: restarted, joined late, or overwritten by an aborted update. It loads from the
store, or from the checkpoint for version 0. It is no member of an update.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from weakref import WeakSet

import structlog

from engines.errors import DeadlineExceeded, EngineError, StoreFailed, WeightUpdateFailed
from engines.model_folder import model_folder
from engines.types import EngineKind, ReplicaState
from engines.weight_label import CHECKPOINT, version_of
from gateway.config.schema import WeightsConfig
from gateway.fleet.brake import Holder
from gateway.fleet.concurrency import bounded
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.weights.canary import Canary
from gateway.weights.snapshots import Snapshots

log = structlog.get_logger()

_AGAIN_S = 5.0
"""Time until a replica that was not brought back is tried again: a store may fail for a while."""
_RESET_AGAIN_S = 0.01
_AND = "; not brought back: "
_FAILURES = (EngineError, DeadlineExceeded, WeightUpdateFailed, StoreFailed)


class CatchUp:
    """Owns a task for each replica that is behind."""

    def __init__(self, config: WeightsConfig, fleet: Fleet, snapshots: Snapshots, canary: Canary) -> None:
        self._config = config
        self._fleet = fleet
        self._snapshots = snapshots
        self._canary = canary
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._restored: set[Replica] = set()
        self._put_off: WeakSet[Replica] = WeakSet()
        self._look = asyncio.Event()
        fleet.on_change(self._look.set)
        snapshots.on_change(self._look_again)

    async def run(self) -> None:
        """Bring back replicas that are behind, until cancelled."""
        try:
            while True:
                await self._look.wait()
                self._look.clear()
                for replica in self._fleet.trained:
                    if replica not in self._tasks and self._is_behind(replica) and replica not in self._put_off:
                        self._own(replica, self._bring_back(replica))
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def bring_back(self, replicas: Iterable[Replica], *, leaves_group: bool = False) -> None:
        """Take replicas that an update had stopped to the fleet's version, and out of their group. The next update
        waits for them. A replica that was not overwritten only drops what it received."""
        for replica in replicas:
            if replica.weight_version is None:
                replica.brake.join(Holder.CATCH_UP)  # frozen until the engine has ended the update
            self._restored.add(replica)
            if replica not in self._tasks:
                self._own(replica, self._bring_back(replica, leaves_group=leaves_group))

    def is_busy_with(self, replica: Replica) -> bool:
        """True while a replica is brought back, or waits for its turn."""
        return replica in self._tasks

    async def forget_kv(self, replica: Replica) -> None:
        """Empty the KV cache of a replica that got weights in the place of unknown ones, before it serves.

        NaN of refused weights would reach later requests from there, and so would KV of requests that are salted with
        an older version. Before the load it would be too early: a request that was dropped may run in the engine until
        then.
        """
        await self._reset_cache(replica)
        await replica.unless_lost(replica.engine.wipe_kv(self._config.control_timeout_s))

    async def settled(self, members: Iterable[Replica], timeout_s: float) -> None:
        """Returns when none of these replicas is being brought back; `DeadlineExceeded` names those that still are."""
        await self._wait(members, timeout_s)
        if late := [replica for replica in members if replica in self._tasks]:
            raise self._late(late)

    async def available(self, replicas: Sequence[Replica], timeout_s: float) -> list[Replica]:
        """The replicas that can be members of an update. Others follow it once they are back.

        Waits for those that served until an update was aborted, or for any where all are busy.
        """
        await self._wait(self._restored.intersection(replicas), timeout_s)
        if all(replica in self._tasks for replica in replicas):
            await self._wait(replicas, timeout_s, asyncio.FIRST_COMPLETED)
        available = [replica for replica in replicas if replica not in self._tasks]
        if replicas and not available:
            raise self._late(replicas)
        return available

    async def _wait(self, replicas: Iterable[Replica], timeout_s: float, until: str = asyncio.ALL_COMPLETED) -> None:
        if tasks := [self._tasks[replica] for replica in replicas if replica in self._tasks]:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=until)

    def _late(self, replicas: Iterable[Replica]) -> DeadlineExceeded:
        names = ", ".join(replica.replica_id for replica in replicas)
        return DeadlineExceeded(f"{names}: still being brought back to version {self._fleet.version}; try again")

    def _look_again(self) -> None:
        self._put_off.clear()
        self._look.set()

    def _is_behind(self, replica: Replica) -> bool:
        """A SYNCING replica with the fleet's weights lacks LoRA adapters, and is left to `AdapterCoordinator`."""
        is_behind = replica.state is ReplicaState.SYNCING and replica.weight_version != self._fleet.version
        return is_behind and replica.info.loads_snapshots

    def _own(self, replica: Replica, work: Coroutine[None, None, None]) -> None:
        self._tasks[replica] = task = asyncio.create_task(work, name=f"catch up {replica.replica_id}")
        task.add_done_callback(partial(self._ended, replica))

    def _ended(self, replica: Replica, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(replica, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and (self._is_behind(replica) or not isinstance(error, _FAILURES)):  # else it is lost
            self._failed(replica, error)
        self._restored.discard(replica)
        replica.brake.let_go(Holder.CATCH_UP)
        self._look.set()

    async def _bring_back(self, replica: Replica, *, leaves_group: bool = False) -> None:
        """Have a replica serve the fleet's version."""
        await self._clear(replica, leaves_group=leaves_group)
        before = replica.found.committed
        if version_of(before) > self._fleet.version and await self._snapshots.adopt(before):
            # The gateway was restarted in the middle of an update: no engine may hold the version before.
            self._fleet.learn(before)
        while self._is_behind(replica):  # the fleet may have taken another version meanwhile
            await self._load(replica, self._fleet.label)

    async def _load(self, replica: Replica, label: str) -> None:
        version = version_of(label)
        async with self._source(replica, label) as path:
            await self._empty(replica)
            await replica.unless_lost(replica.engine.load_snapshot(path, version, self._config.load_timeout_s))
            await self._admit(replica, label, f"loaded version {version} from {path}")

    async def _empty(self, replica: Replica) -> None:
        """End the rollouts of a replica whose weights are overwritten next.

        An engine that loads between steps may end its requests during the load, which takes longer.
        """
        replica.lose_version()
        replica.drop_calls(rollouts_alone=True)  # a replica that was SUSPECT during the update may still have some
        await bounded(replica.idle.wait(), self._config.control_timeout_s, "its rollouts did not end")
        if not replica.info.loads_between_steps:
            await self._reset_cache(replica)

    async def _admit(self, replica: Replica, label: str, how: str) -> None:
        """Check the weights by the canary, label and serve them, if they are still the fleet's. Not before: a gateway
        that restarts serves them by the label."""
        await self.forget_kv(replica)
        timeout_s, version = self._config.control_timeout_s, version_of(label)
        if self._canary.is_enabled:
            async with replica.brake.lifted(timeout_s):  # a paused engine cannot answer
                finding = await self._canary.admit(replica, version)
            log.info("canary", replica=replica.replica_id, version=version, **finding.report())
            if not finding.may_serve:
                raise WeightUpdateFailed(finding.reason, replica_id=replica.replica_id)
        await replica.unless_lost(replica.engine.label_weights(label, timeout_s, is_committed=True))
        replica.hold(version, keeps_kv=False)
        log.info("replica caught up", replica=replica.replica_id, version=version)
        if replica.state is ReplicaState.SYNCING:
            self._fleet.settle(replica, how)

    async def _reset_cache(self, replica: Replica) -> None:
        """Empty the prefix cache: refused weights may have written KV for requests salted with an older version.

        The engine refuses while it still ends the requests that were dropped.
        """
        if not replica.info.has("/reset_prefix_cache"):
            return

        async def reset() -> None:
            while not await replica.engine.reset_prefix_cache(self._config.control_timeout_s):  # noqa: ASYNC110 it says no
                await asyncio.sleep(_RESET_AGAIN_S)

        await bounded(replica.unless_lost(reset()), self._config.control_timeout_s, "its prefix cache was not reset")

    @asynccontextmanager
    async def _source(self, replica: Replica, label: str) -> AsyncIterator[str]:
        """The folder of the version. Raises `StoreFailed` where there is none."""
        if label == CHECKPOINT:
            group = self._fleet.models.groups[replica.info.group]
            if group.kind is EngineKind.EXTERNAL:
                raise StoreFailed(f"the checkpoint of {replica.info.url} is somebody else's")
            yield str(model_folder(group) or group.model or group.served_name)
            return
        async with self._snapshots.reading(label) as path:
            yield str(path)

    async def _clear(self, replica: Replica, *, leaves_group: bool) -> None:
        """End the update in the engine. An engine that does not answer is found by its probes."""
        engine = replica.engine
        calls = [engine.abandon_weight_update if replica.weight_version is None else engine.drop_receipt]
        if leaves_group:
            calls.append(engine.close_weight_group)
        for call in calls:
            try:
                await call(self._config.control_timeout_s)
            except (EngineError, DeadlineExceeded) as error:
                log.warning("could not clear up", replica=replica.replica_id, error=str(error))
        replica.brake.let_go(Holder.CATCH_UP)

    def _failed(self, replica: Replica, error: BaseException) -> None:
        """Put a replica off that was not brought back. The next update takes it along, if that comes first."""
        self._put_off.add(replica)
        asyncio.get_running_loop().call_later(_AGAIN_S, self._look_again)
        reason = str(error) or type(error).__name__
        reason = f"it waits for the next update, since {reason}" if isinstance(error, StoreFailed) else reason
        told = f"{replica.reason.partition(_AND)[0]}{_AND}{reason}"
        if told != replica.reason:
            log.error("replica is not brought back", replica=replica.replica_id, reason=reason)
            self._fleet.explain(replica, told)
