"""Brings back replicas whose weights are not the fleet's: from the store, and to version 0 from the checkpoint.

A replica is behind when it is SYNCING: started anew, joined late, or left in the middle by an update that was aborted.
One that serves the version of a rolling update that came to nothing is ahead, and serves on until it is its turn.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from weakref import WeakKeyDictionary

import structlog

from engines.errors import DeadlineExceeded, EngineError, EngineUnreachable, StoreFailed, WeightUpdateFailed
from engines.model_folder import model_folder
from engines.types import EngineKind, ReplicaState
from gateway.config.schema import WeightsConfig
from gateway.fleet.brake import Holder
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.weights.canary import Canary
from gateway.weights.snapshots import Snapshots, bounded

log = structlog.get_logger()

_TRIES = 3
_RETRY_S = 2.0
_AND = "; not brought back: "


class CatchUp:
    """One task for each replica that is behind. Owns them all."""

    def __init__(
        self,
        config: WeightsConfig,
        fleet: Fleet,
        snapshots: Snapshots,
        canary: Canary,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._snapshots = snapshots
        self._canary = canary
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._ahead: set[Replica] = set()
        self._given_up: WeakKeyDictionary[Replica, int] = WeakKeyDictionary()
        self._look = asyncio.Event()
        fleet.on_change(self._look.set)
        snapshots.on_change(self._look_again)

    async def run(self) -> None:
        """Bring back whoever is behind, until cancelled."""
        try:
            while True:
                await self._look.wait()
                self._look.clear()
                for replica in self._fleet.trained:
                    if self._is_behind(replica) and self._given_up.get(replica) != self._fleet.version:
                        self._start(replica, leaves_group=False)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def restore(self, replicas: Iterable[Replica], *, leaves_group: bool) -> None:
        """Take these, which an update has left in the middle, back to the fleet's version, and out of their group."""
        for replica in replicas:
            replica.brake.join(Holder.CATCH_UP)  # frozen until the engine has ended the update
            self._start(replica, leaves_group=leaves_group)

    def take_back(self, replicas: Iterable[Replica], width: int) -> None:
        """Take these, which are ahead, back to the fleet's version, so many at a time."""
        turns = asyncio.Semaphore(width)
        self._ahead = {replica for replica in replicas if replica not in self._tasks}
        for replica in self._ahead:
            self._own(replica, self._take_back(replica, turns))
        if not self._ahead:
            self._fleet.end_roll()

    async def settled(self, timeout_s: float) -> None:
        """Returns when nobody is being brought back; `DeadlineExceeded` names who still is."""
        tasks = [task for task in self._tasks.values() if task is not asyncio.current_task()]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        if late:
            names = ", ".join(replica.replica_id for replica, task in self._tasks.items() if task in late)
            raise DeadlineExceeded(f"{names}: still being brought back to version {self._fleet.version}; try again")

    def _look_again(self) -> None:
        self._given_up.clear()
        self._look.set()

    def _is_behind(self, replica: Replica) -> bool:
        """One that is SYNCING with the fleet's weights misses LoRA adapters, and is not ours."""
        is_behind = replica.state is ReplicaState.SYNCING and replica.weight_version != self._fleet.version
        return is_behind and replica.info.loads_snapshots

    def _start(self, replica: Replica, *, leaves_group: bool) -> None:
        if replica not in self._tasks:
            self._own(replica, self._bring_back(replica, leaves_group=leaves_group))

    def _own(self, replica: Replica, work: Coroutine[None, None, None]) -> None:
        self._tasks[replica] = task = asyncio.create_task(work, name=f"catch up {replica.replica_id}")
        task.add_done_callback(lambda _: self._ended(replica))

    def _ended(self, replica: Replica) -> None:
        self._tasks.pop(replica, None)
        replica.brake.let_go(Holder.CATCH_UP)
        self._look.set()
        if replica in self._ahead:
            self._ahead.remove(replica)
            if not self._ahead:
                self._fleet.end_roll()

    async def _take_back(self, replica: Replica, turns: asyncio.Semaphore) -> None:
        async with turns:
            if not replica.can_serve:
                return  # gone; or out of service, and the watch over those behind sees to it
            version = replica.weight_version
            self._fleet.set_state(replica, ReplicaState.UPDATING, f"leaves version {version}, which was aborted")
            try:
                await bounded(replica.idle.wait(), self._config.drain_timeout_s, "its rollouts did not end")
            except DeadlineExceeded as error:
                log.warning("its rollouts are done elsewhere", replica=replica.replica_id, reason=str(error))
            if replica.state is ReplicaState.UPDATING:
                self._fleet.fence(replica, f"held version {version}, which was aborted")
                # A gateway that is started anew may give the number again, to other weights.
                await self._try(replica, replica.engine.reset_prefix_cache)
                await self._bring_back(replica, leaves_group=False)

    async def _bring_back(self, replica: Replica, *, leaves_group: bool) -> None:
        is_overwritten = replica.weight_version is None
        clearing = self._clear(replica, is_overwritten=is_overwritten, leaves_group=leaves_group)
        if is_overwritten:
            # A gateway that died in the middle of an update left nobody who says what they held before.
            held, _ = await asyncio.gather(self._snapshots.last_held_by(replica.info.incarnation), clearing)
            self._fleet.learn(held)
        else:
            await clearing
        for failures in range(1, _TRIES + 1):
            if not self._is_behind(replica):
                return
            version = self._fleet.version
            try:
                await self._load(replica, version)
            except StoreFailed as error:
                self._give_up(replica, version, f"it waits for the next update, since {error}")
                return
            except (EngineError, DeadlineExceeded, WeightUpdateFailed) as error:
                log.warning("catch up failed", replica=replica.replica_id, version=version, error=str(error))
                if failures == _TRIES:
                    self._give_up(replica, version, f"did not take version {version}: {error}")
                    return
                with suppress(EngineUnreachable):  # whoever waits for us does not wait for one that is gone
                    await replica.unless_lost(asyncio.sleep(_RETRY_S))

    async def _load(self, replica: Replica, version: int) -> None:
        """Load, check, and serve if that is still the fleet's version."""
        timeout_s = self._config.load_timeout_s
        async with self._source(replica, version) as path:
            replica.lose_version()
            await self._snapshots.note_overwritten([replica])
            replica.drop_calls()  # of a replica that was silent while the others went on
            await bounded(replica.idle.wait(), self._config.control_timeout_s, "its rollouts did not end")
            load = replica.engine.load_snapshot(path, version, timeout_s)
            await bounded(replica.unless_lost(load), timeout_s, f"replica {replica.replica_id} did not load {path}")
        # A paused engine cannot answer; the next update reads its canary.
        if self._canary.is_enabled and not replica.brake.holders:
            finding = await self._canary.admit(replica, version)
            log.info("canary", replica=replica.replica_id, version=version, **finding.report())
            if not finding.may_serve:
                raise WeightUpdateFailed(finding.reason, replica_id=replica.replica_id)
        replica.hold(version, keeps_kv=False)
        await self._snapshots.note_holders(version, [replica])
        log.info("replica caught up", replica=replica.replica_id, version=version)
        if replica.state is ReplicaState.SYNCING:
            self._fleet.settle(replica, f"loaded version {version} from {path}")

    @asynccontextmanager
    async def _source(self, replica: Replica, version: int) -> AsyncIterator[str]:
        """The folder that holds the version; `StoreFailed` where there is none."""
        if version == 0:
            group = self._fleet.models.groups[replica.info.group]
            if group.kind is EngineKind.EXTERNAL:
                raise StoreFailed(f"the checkpoint of {replica.info.url} is somebody else's")
            yield str(model_folder(group) or group.model or group.served_name)
            return
        holders = [other.info.incarnation for other in self._fleet.trained]
        async with self._snapshots.reading(version, holders) as path:
            yield str(path)

    async def _clear(self, replica: Replica, *, is_overwritten: bool, leaves_group: bool) -> None:
        """End what the update left open. An engine that cannot take part in it is found out by its probes."""
        engine = replica.engine
        calls: list[Callable[[float], Awaitable[None]]] = []
        if is_overwritten or leaves_group:
            calls.append(engine.drop_receipt)
        if is_overwritten:
            calls.append(engine.abandon_weight_update)
        if leaves_group:
            calls.append(engine.close_weight_group)
        for call in calls:
            await self._try(replica, call)
        replica.brake.let_go(Holder.CATCH_UP)

    async def _try(self, replica: Replica, call: Callable[[float], Awaitable[object]]) -> None:
        try:
            await call(self._config.control_timeout_s)
        except (EngineError, DeadlineExceeded) as error:
            log.warning("could not clear up", replica=replica.replica_id, error=str(error))

    def _give_up(self, replica: Replica, version: int, reason: str) -> None:
        self._given_up[replica] = version
        log.error("replica is not brought back", replica=replica.replica_id, version=version, reason=reason)
        self._fleet.explain(replica, f"{replica.reason.partition(_AND)[0]}{_AND}{reason}")
