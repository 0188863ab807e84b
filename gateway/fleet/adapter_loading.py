"""Loads LoRA adapters on the whole fleet: every replica of the policy holds an adapter, or none serves it.

A replica that joins or returns loads the adapters in use before it serves.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import structlog

from engines.checkpoint.adapter import read_adapter
from engines.errors import (
    DeadlineExceeded,
    InvalidRequest,
    UnknownModel,
    WeightUpdateConflict,
    WeightUpdateFailed,
)
from engines.types import EngineKind, ReplicaState
from gateway.config.schema import WeightsConfig
from gateway.fleet.adapters import Adapter
from gateway.fleet.concurrency import is_set_within
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import failures_on, on_one, try_on_all

log = structlog.get_logger()

LOAD_ROUTE = "/v1/load_lora_adapter"
_LOOK_EVERY_S = 1.0


class AdapterCoordinator:
    """Loads and unloads on every replica of the policy, one adapter at a time."""

    def __init__(self, config: WeightsConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._timeout_s = 2 * config.adapter_timeout_s  # of a call, and of its wait for another on the same replica
        self._one_at_a_time = asyncio.Lock()
        self._changing = ""
        self._busy: WeakKeyDictionary[Replica, asyncio.Lock] = WeakKeyDictionary()
        self._catching_up: WeakKeyDictionary[Replica, asyncio.Task[None]] = WeakKeyDictionary()
        self._look_again = asyncio.Event()
        fleet.on_change(self._look_again.set)

    async def load(self, name: str, path: str) -> None:
        """Load the adapter in folder `path` under `name` on every replica of the policy.

        Raise `InvalidRequest` before any engine is called; raise `WeightUpdateFailed` when a replica fails, and then no
        replica keeps the adapter.
        """
        async with self._one_at_a_time:
            if name in self._fleet.models.names:
                raise InvalidRequest(
                    f"lora_name {name!r} is the name of a model here: choose another", param="lora_name"
                )
            if self._fleet.adapters.get(name) is not None:
                raise InvalidRequest(
                    f"The lora adapter '{name}' has already been loaded: give each version a name of its own, or "
                    "unload this one first.",
                    param="lora_name",
                )
            self._check_unused(name)
            await self._fleet.settled_within(self._config.control_timeout_s)
            members = self._members()
            await self._check_folder(path, members)
            self._check_room(members)
            await self._load(Adapter(name, path, load_id=time.time_ns(), loads=self._fleet.adapters.next_load(name)))

    async def unload(self, name: str) -> None:
        """Refuse new requests of the adapter, wait until its rollouts end, and unload it on every replica.

        Raise `UnknownModel` for a name that is not loaded, and `DeadlineExceeded` where rollouts go on using it: it is
        then unloaded when they end.
        """
        async with self._one_at_a_time:
            adapter = self._fleet.adapters.get(name)
            if adapter is None:
                loaded = ", ".join(adapter.name for adapter in self._fleet.adapters.loaded) or "none"
                raise UnknownModel(
                    f"The lora adapter '{name}' cannot be found; loaded adapters: {loaded}.", param="lora_name"
                )
            await self._retire(adapter)

    async def run(self) -> None:
        """Load missing adapters on replicas and unload left-over adapters, until cancelled."""
        try:
            while True:
                self._look_again.clear()
                for replica in self._fleet.trained_alive:
                    before = self._catching_up.get(replica)
                    needs_it = self._left_over(replica) or self._fleet.missing_adapters(replica)
                    if needs_it and (before is None or before.done()):
                        task = asyncio.create_task(self._catch_up(replica), name=f"adapters of {replica.replica_id}")
                        self._catching_up[replica] = task
                await is_set_within(self._look_again, _LOOK_EVERY_S)
        finally:
            tasks = list(self._catching_up.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, adapter: Adapter) -> None:
        began, self._changing = time.monotonic(), adapter.name
        try:
            # A replica that joins meanwhile loads in another round: an adapter is served once every replica holds it.
            while lacking := [replica for replica in self._members() if not replica.holds(adapter)]:
                await self._on_all(lacking, lambda replica: self._put(replica, adapter), "load")
            self._fleet.adapters.add(adapter)
        except BaseException:
            holders, name = self._holders(adapter.name), adapter.name  # `run` retries those that fail
            await try_on_all(holders, lambda replica: self._take(replica, name), self._timeout_s, "keeps an adapter")
            raise
        finally:
            self._changing = ""
        log.info("adapter loaded", adapter=adapter.name, path=adapter.path, seconds=round(time.monotonic() - began, 3))

    async def _retire(self, adapter: Adapter) -> None:
        self._fleet.adapters.remove(adapter)
        timeout_s = self._config.adapter_unload_timeout_s
        if not await is_set_within(adapter.unused, timeout_s):
            raise DeadlineExceeded(
                f"the LoRA adapter {adapter.name!r} takes no new requests, but {adapter.users} rollouts still use it "
                f"after {timeout_s:g} s (weights.adapter_unload_timeout_s): it is unloaded when they end"
            )
        self._changing = adapter.name
        try:
            holders = self._holders(adapter.name)
            await self._on_all(holders, lambda replica: self._take(replica, adapter.name), "unload")
        finally:
            self._changing = ""
            for replica in self._fleet.trained_alive:
                if replica.state is ReplicaState.SYNCING:  # it could not load the adapter, which is wanted no longer
                    self._fleet.settle(replica, "holds all LoRA adapters")
        log.info("adapter unloaded", adapter=adapter.name)

    async def _catch_up(self, replica: Replica) -> None:
        """Load and unload one replica's adapters as needed. A failure is shown in the replica's reason and retried."""
        doing = ""
        try:
            for name in self._left_over(replica):
                doing = f"unload LoRA adapter {name}"
                await on_one(replica, partial(self._take, name=name), self._timeout_s)
            while missing := self._fleet.missing_adapters(replica):
                doing = f"load LoRA adapter {missing[0].name} from {missing[0].path}"
                await on_one(replica, partial(self._put, adapter=missing[0]), self._timeout_s)
        except Exception as error:  # of any kind: without a retry the replica would never serve again
            is_expected = isinstance(error, WeightUpdateFailed | DeadlineExceeded)
            reason = str(error) or type(error).__name__
            log.warning(
                "adapters do not catch up", replica=replica.replica_id, doing=doing, error=reason,
                exc_info=not is_expected,
            )  # fmt: skip
            if replica.state is ReplicaState.SYNCING:
                self._fleet.explain(replica, f"cannot {doing}, tries again: {reason}")
            await asyncio.sleep(_LOOK_EVERY_S)
            return
        if replica.state is ReplicaState.SYNCING:
            self._fleet.settle(replica, "holds all LoRA adapters")

    async def _put(self, replica: Replica, adapter: Adapter) -> None:
        async with self._lock(replica):
            if replica.holds(adapter):
                return
            timeout_s = self._config.adapter_timeout_s
            if adapter.name in replica.adapters:  # an earlier load, or an unfinished one
                await replica.engine.unload_lora_adapter(adapter.name, timeout_s)
            replica.adapters[adapter.name] = None
            await replica.engine.load_lora_adapter(adapter.name, adapter.path, timeout_s)
            replica.adapters[adapter.name] = adapter
        self._fleet.notify()

    async def _take(self, replica: Replica, name: str) -> None:
        async with self._lock(replica):
            if name in replica.adapters:
                replica.adapters[name] = None
                await replica.engine.unload_lora_adapter(name, self._config.adapter_timeout_s)
                del replica.adapters[name]

    def _left_over(self, replica: Replica) -> list[str]:
        """Return the adapters of the engine that requests can no longer name."""
        return [
            name
            for name, adapter in replica.adapters.items()
            if self._fleet.adapters.get(name) is None and name != self._changing and not (adapter and adapter.users)
        ]

    def _holders(self, name: str) -> list[Replica]:
        return [replica for replica in self._fleet.trained_alive if name in replica.adapters]

    def _members(self) -> list[Replica]:
        """Return the replicas that must hold an adapter. Raise `WeightUpdateConflict` where a replica cannot."""
        members = self._fleet.trained_alive
        if not members:
            raise WeightUpdateConflict("no replica of the policy is up to load an adapter: see /health")
        for replica in members:
            group = self._fleet.models.groups[replica.info.group]
            can_take = group.enable_lora or group.kind is EngineKind.EXTERNAL
            if not can_take or LOAD_ROUTE not in replica.info.capabilities:
                raise WeightUpdateConflict(
                    f"replica {replica.replica_id} ({replica.info.kind} at {replica.info.url}) takes no LoRA adapters: "
                    "set engine.enable_lora, max_loras and max_lora_rank; a vLLM of your own needs --enable-lora and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                )
        return members

    async def _check_folder(self, path: str, members: Sequence[Replica]) -> None:
        """Check rank and shapes, except for external servers: they may read another machine's folder."""
        ours = [replica for replica in members if replica.info.kind is not EngineKind.EXTERNAL]
        if not ours:
            return
        found = await asyncio.to_thread(read_adapter, Path(path))
        largest = min(self._fleet.models.groups[replica.info.group].max_lora_rank for replica in ours)
        if found.rank > largest:
            raise InvalidRequest(
                f"lora_path: the adapter in {path} has rank {found.rank}, and engine.max_lora_rank is {largest}: start "
                "the engines with a larger rank",
                param="lora_path",
            )
        for replica in ours:
            found.check_fits(replica.info.tensors or ())

    def _check_unused(self, name: str) -> None:
        for replica in self._holders(name):
            held = replica.adapters[name]
            if held is not None and held.is_leaving and held.users:
                raise WeightUpdateConflict(
                    f"{held.users} rollouts still use the LoRA adapter {name!r} that was unloaded: wait for them, or "
                    "take another name"
                )

    def _check_room(self, members: Sequence[Replica]) -> None:
        """Raise where engines are full: vLLM would silently evict an adapter and read it again at the next use."""
        others = [adapter.name for adapter in self._fleet.adapters.loaded]
        groups = (self._fleet.models.groups[replica.info.group] for replica in members)
        room = min((group.num_adapters for group in groups if group.enable_lora), default=None)
        if room is not None and len(others) >= room:
            raise WeightUpdateConflict(
                f"the engines hold {room} LoRA adapters (engine.max_cpu_loras, or max_loras), and {', '.join(others)} "
                "are loaded: unload an adapter first, or start the engines with more"
            )

    async def _on_all(self, replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[None]], verb: str) -> None:
        """Make the call on all replicas. Raise the first failure when all calls have ended."""
        for replica, error in (await failures_on(replicas, call, self._timeout_s)).items():
            raise WeightUpdateFailed(
                f"replica {replica.replica_id} did not {verb} the adapter: {error}", replica_id=replica.replica_id
            ) from error

    def _lock(self, replica: Replica) -> asyncio.Lock:
        return self._busy.setdefault(replica, asyncio.Lock())
