"""The fleet: the replicas, their states and weight versions, and the watch over them.

States and versions are assigned here alone. `weights/updates/update.py` decides about updates, and `scheduler.py`
places rollouts.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import structlog

from engines.errors import (
    EngineError,
    EngineFailed,
    EngineGone,
    EngineUnreachable,
    UnknownModel,
    WeightUpdateConflict,
)
from engines.types import EngineKind, EngineStart, ReplicaInfo, ReplicaState
from engines.weight_label import CHECKPOINT, version_of
from gateway.config.models import Models
from gateway.config.schema import Config
from gateway.fleet.adapters import Adapter, Adapters
from gateway.fleet.history import Events
from gateway.fleet.replica import Replica
from gateway.fleet.watch.arrivals import Arrivals, Connect
from gateway.fleet.watch.evidence import Failure
from gateway.fleet.watch.probes import Probes
from gateway.fleet.watch.standstill import Standstill
from gateway.fleet.watch.starts import Starts, words

log = structlog.get_logger()

_WAKES_WITHIN_S = 6.0
"""A standby takes 2 to 3 s to serve (7B on an H200)."""

_LEAVES = "Serve removes it; it finishes what it has"
_OF_AN_UPDATE = {ReplicaState.SERVING, ReplicaState.UPDATING}
"""States between which each replica goes in an update, which is one event by itself."""

Discover = Callable[[], Awaitable[list[ReplicaInfo]]]


class Fleet:
    """All replicas of all models.

    `version` is the policy's committed weight version, `label` its label. `target_version` is the next one while an
    update runs. `spent` is the highest number whose tokens may have been delivered. `discover` lists the replicas that
    Serve runs; `connect` makes a replica's engine client.
    """

    def __init__(self, config: Config, *, discover: Discover, connect: Connect) -> None:
        self.version = 0
        self.label = CHECKPOINT
        self.update_to: int | None = None
        self._begun = 0
        self.spent = 0
        self.models = Models(config.groups)
        self.adapters = Adapters()
        self.events = Events()
        self.arrivals = Arrivals(config.fleet, self.models, self.adapters, self.events, connect)
        self.starts = Starts()
        self._listed: set[str] = set()
        self.losses: Counter[str] = Counter()
        self._last_loss: dict[str, str] = {}
        self.expected_by_group = {name: group.num_replicas for name, group in config.groups.items()}
        self._config = config.fleet
        self._discover = discover
        self._replicas: dict[str, Replica] = {}
        self._of_model: dict[tuple[str, bool], list[Replica]] = {}  # alive, or serving alone; until a state changes
        self._watchers: dict[Replica, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self.probes = Probes(config.fleet, self.serving)
        self._standstill = Standstill(config.fleet)
        self._listeners: list[Callable[[], None]] = []
        self._incomplete_since: float | None = time.monotonic()
        self._has_committed = False

    @property
    def expected(self) -> int:
        return sum(self.expected_by_group.values())

    @property
    def most_of_policy(self) -> int:
        """The replicas of the policy, once Serve has added all that it may."""
        groups = [(group, self.models.groups[group]) for group in self.expected_by_group]
        return sum(one.max_replicas or self.expected_by_group[name] for name, one in groups if not one.frozen)

    @property
    def replicas(self) -> list[Replica]:
        """All replicas in a fixed order, from which weight groups derive ranks."""
        return [self._replicas[key] for key in sorted(self._replicas)]

    def find(self, replica_id: str) -> Replica | None:
        """The replica of this id, if it is known."""
        return self._replicas.get(replica_id)

    @property
    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_alive]

    @property
    def trained(self) -> list[Replica]:
        """The replicas of the policy: all that are not frozen."""
        return [replica for replica in self.replicas if not replica.frozen]

    @property
    def trained_alive(self) -> list[Replica]:
        return [replica for replica in self.trained if replica.is_alive]

    def updatable(self) -> list[Replica]:
        """The living replicas of the policy. Raises `WeightUpdateConflict` where all models are frozen."""
        if self.models.all_frozen:
            raise WeightUpdateConflict(
                f"every model here is frozen ({', '.join(self.models.names)}), so there is nothing to update or "
                "pause: an engine group that is not frozen is the policy"
            )
        return self.trained_alive

    def serving(self, model: str, adapter: Adapter | None = None) -> Sequence[Replica]:
        """Replicas that take rollouts of `model`, or of an adapter of it."""
        found = self._found(model, serving=True)
        return found if adapter is None else [replica for replica in found if replica.holds(adapter)]

    def alive_of(self, model: str) -> Sequence[Replica]:
        """The living replicas of a model."""
        return self._found(model, serving=False)

    def _found(self, model: str, *, serving: bool) -> list[Replica]:
        found = self._of_model.get((model, serving))
        if found is None:
            ours = [replica for replica in self.alive if replica.info.model == model]
            found = self._of_model[model, serving] = [one for one in ours if one.can_serve] if serving else ours
        return found

    def asked(self, name: object) -> tuple[str, Adapter | None]:
        """The model of a request that names `name`, and the adapter where `name` is an adapter's.

        Raises as `Models.asked`; the message of `UnknownModel` lists adapters too.
        """
        adapter = self.adapters.get(name)
        if adapter is not None:
            return self.models.first, adapter
        try:
            return self.models.asked(name), None
        except UnknownModel as error:
            adapters = ", ".join(adapter.name for adapter in self.adapters.loaded) or "none"
            raise UnknownModel(f"{error}; LoRA adapters: {adapters}", param="model") from error

    def missing_adapters(self, replica: Replica) -> list[Adapter]:
        """Loaded adapters that this replica of the policy lacks."""
        return [] if replica.frozen else [adapter for adapter in self.adapters.loaded if not replica.holds(adapter)]

    @property
    def target_version(self) -> int:
        return self.version if self.update_to is None else self.update_to

    @property
    def next_version(self) -> int:
        """The number of the next update. A number whose tokens may have been delivered is not used again."""
        return max(self.version, self.spent) + 1

    def is_current(self, replica: Replica) -> bool:
        """True where a replica may serve with the weights that it holds."""
        return replica.frozen or replica.weight_version == self.version

    def begin(self, version: int) -> None:
        """Announce an update to this version."""
        self.update_to, self._begun = version, max(self._begun, version)

    def overwrite(self, replicas: Iterable[Replica], version: int) -> None:
        """Engines are overwritten next: until the commit none holds a known version, and rollouts wait in `vouched`."""
        for replica in replicas:
            replica.lose_version()  # the next call on a lost replica fails and names it
            self.set_state(replica, ReplicaState.UPDATING, f"update to version {version}")

    def commit(self, label: str, members: Iterable[Replica], fenced: Mapping[Replica, str], *, keeps_kv: bool) -> None:
        """Serve the version of this label on these members, but for the fenced ones, whose reason is given."""
        self.version = version = version_of(label)
        self.label, self._has_committed = label, True
        self.update_to = None
        for replica in members:
            if replica not in fenced:
                replica.hold(version, keeps_kv=keeps_kv)
        for replica, reason in fenced.items():
            self.fence(replica, f"fenced at version {version}: {reason}")
        for replica in self.trained_alive:
            if replica not in fenced:
                self.settle(replica, f"version {version} committed")

    def abort(self, version: int, reason: str) -> list[Replica]:
        """Serve the version before again. Returns the replicas that were being overwritten, which are fenced."""
        overwritten = [replica for replica in self.trained_alive if replica.state is ReplicaState.UPDATING]
        for replica in overwritten:
            self.fence(replica, f"update to version {version} aborted: {reason}")
        self.update_to = None
        return overwritten

    def version_of(self, model: str) -> int:
        """The weight version of a model: 0, its checkpoint, where it is frozen."""
        return self.version if model == self.models.policy else 0

    def target_of(self, model: str) -> int:
        """The weight version that replicas of a model are brought to."""
        return self.target_version if model == self.models.policy else 0

    def why_fixed(self, model: str) -> str:
        """The reason why the version of a model never changes; empty where it may."""
        if model != self.models.policy:
            return f"model {model!r} is frozen and holds version 0, its checkpoint, for ever"
        if self.trained and not any(replica.info.takes_weights for replica in self.trained):
            return f"no replica of {model!r} takes weights, and they hold version {self.version}"
        return ""

    @property
    def is_ready(self) -> bool:
        """True when all expected replicas are there or fleet.complete_within_s has passed; never without the policy."""
        needed = self.replicas if self.models.all_frozen else self.trained
        if not any(replica.is_alive for replica in needed):
            return False
        since = self._incomplete_since
        return since is None or time.monotonic() - since > self._config.complete_within_s

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of a state."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Discover and watch replicas until cancelled."""
        try:
            while True:
                self._news.clear()
                await self.look()
                for watcher in self._watchers.values():
                    if watcher.done():
                        watcher.result()  # raises: its replica would never be found lost
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), self._config.discover_interval_s)
        finally:
            for replica, watcher in self._watchers.items():
                replica.brake.close()
                watcher.cancel()
            await asyncio.gather(*self._watchers.values(), return_exceptions=True)
            await asyncio.gather(*self._closing, *(replica.engine.close() for replica in self.replicas))

    async def look(self) -> None:
        """One round of discovery."""
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                infos = await self._discover()
        except Exception as error:  # any error of Ray's: the next round asks again
            log.warning("discovery failed", error=repr(error))
            return
        listed = {info.replica_id: info for info in infos}
        self._listed = set(listed)
        is_open = self.settled_version is None
        for replica in self.replicas:
            replica.evidence.is_listed = replica.replica_id in listed
        self.arrivals.forget_all_but(listed)
        known = {replica.replica_id: replica.info.incarnation for replica in self.replicas}
        new = [info for info in infos if known.get(info.replica_id) != info.incarnation]
        joined = [replica for replica in await asyncio.gather(*map(self._welcome, new)) if replica is not None]
        if joined:
            self._agree(joined, is_open=is_open)
        for replica in joined:
            self.starts.end(replica.replica_id)
            is_known = replica.weight_version is not None
            self.settle(replica, "joined" if is_known else "joined with weights that no commit is known of")
            self._watchers[replica] = asyncio.create_task(self._watch(replica), name=f"watch {replica.replica_id}")

    async def metrics_pages(self) -> dict[Replica, str]:
        """The Prometheus pages of the living engines that answer with one."""
        replicas = self.alive
        pages = await asyncio.gather(
            *(replica.engine.metrics(self._config.probe_timeout_s) for replica in replicas), return_exceptions=True
        )
        return {replica: page for replica, page in zip(replicas, pages, strict=True) if isinstance(page, str)}

    async def settled_within(self, timeout_s: float) -> None:
        """Wait until no replica of the policy is SUSPECT, at most so long: each answers again, or is LOST. Where all
        are lost, wait for the first engine that follows, as rollouts do.

        A late probe on a busy machine must not change an update's members.
        """
        if not await self._is_so_within(self._is_settled, timeout_s):
            log.warning("a replica stays SUSPECT, or none is back", seconds=timeout_s)

    def _is_settled(self) -> bool:
        are_back = bool(self.trained) or not self._last_loss
        return are_back and not any(replica.state is ReplicaState.SUSPECT for replica in self.trained)

    async def serves_within(self, model: str, timeout_s: float) -> bool:
        """Wait until a replica of the model serves, at most so long. Return False where none does in time."""
        return await self._is_so_within(lambda: bool(self.serving(model)), timeout_s)

    async def _is_so_within(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Look at each change until the condition holds, at most so long. Return False where it does not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def set_state(self, replica: Replica, state: ReplicaState, reason: str) -> None:
        """Move a replica to a state. LOST is the last: its engine is another replica when it is back."""
        if replica.state in (state, ReplicaState.LOST):
            return
        log.info(
            "replica state", replica=replica.replica_id, was=replica.state, now=state, version=replica.weight_version,
            reason=reason,
        )  # fmt: skip
        if {replica.state, state} != _OF_AN_UPDATE:
            self.events.add(replica.replica_id, f"{replica.state} -> {state}: {reason}")
        was_alive = replica.is_alive
        replica.enter(state, reason)
        self._of_model.clear()
        if was_alive and state in (ReplicaState.SUSPECT, ReplicaState.LOST):
            self._leave_rests_to_standby(replica)
        if state is ReplicaState.LOST:
            self._count_loss(replica)
            self._forget(replica)
        elif state is ReplicaState.SERVING:
            self._take_rests(replica.info.model)
        self._look_who_is_missing()
        self.notify()

    def told(self, start: EngineStart) -> None:
        """Note how far a start has come; discover its engine once it has ended."""
        if start.phases:
            self.starts.tell(start)
        else:
            self._news.set()

    def expect(self, num_replicas: Mapping[str, int]) -> None:
        """Set the expected number of replicas of these engine groups."""
        known = {group: count for group, count in num_replicas.items() if group in self.expected_by_group}
        self.expected_by_group |= known
        self._look_who_is_missing()
        self.notify()

    def drain(self, replica_id: str) -> int:
        """Stop placing on a replica that Serve is removing; returns its samples in flight."""
        replica = self.find(replica_id)
        if replica is None:
            return 0
        replica.is_leaving = True
        if replica.state not in (ReplicaState.SUSPECT, ReplicaState.LOST):
            self.set_state(replica, ReplicaState.DRAINING, _LEAVES)
        return replica.load_samples

    def _look_who_is_missing(self) -> None:
        there = Counter(replica.info.group for replica in self.alive)
        missing = any(there[group] < expected for group, expected in self.expected_by_group.items())
        self._incomplete_since = (self._incomplete_since or time.monotonic()) if missing else None
        if not missing:
            self._last_loss.clear()

    @property
    def missing(self) -> list[tuple[str, str, EngineStart | None]]:
        """The engine group of each replica that is missing or starts, the reason, and its start."""
        there, found = Counter(replica.info.group for replica in self.replicas), []
        for group, expected in self.expected_by_group.items():
            starts = [start for start in self.starts.now if start.group == group]
            loss = self._last_loss.get(group, "")
            for start in [*starts, *[None] * (expected - there[group] - len(starts))]:
                told = words(start) if start else "another engine follows" if loss else "has not joined yet"
                found.append((group, f"{loss}; {told}" if loss else told, start))
        return found

    def _count_loss(self, replica: Replica) -> None:
        """A replica that Serve removes on purpose is no loss."""
        if replica.is_leaving:
            replica.place.leave()
        else:
            self.losses[replica.info.group] += 1
            self._last_loss[replica.info.group] = f"{replica.replica_id} was lost: {replica.reason}"

    def _leave_rests_to_standby(self, lost: Replica) -> None:
        """Where a standby follows a lost engine, have the others leave most of its rollouts to it, while it wakes. An
        engine that held much of a GPU's memory closes its port a second after its end: until then it is SUSPECT."""
        if self.models.groups[lost.info.group].standby and not lost.is_leaving:
            others = self.serving(lost.info.model)
            share = sum(len(replica.prompts) for replica in (lost, *others)) / (1 + len(others))
            for replica in others:
                replica.prompts.leave_rests(share)
            asyncio.get_running_loop().call_later(_WAKES_WITHIN_S, self._take_rests, lost.info.model)

    def _take_rests(self, model: str) -> None:
        for replica in self.serving(model):
            replica.prompts.take_rests()
        self.notify()

    def notify(self) -> None:
        """Call the listeners: replicas may take rollouts that they could not take before."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for listener in self._listeners:
            listener()

    def learn(self, label: str) -> None:
        """Take over a newer version that was committed before the gateway was restarted. A version that this gateway
        began is no news."""
        if version_of(label) > max(self.version, self._begun):
            self.version, self.label = version_of(label), label
            for replica in self.trained:
                if replica.can_serve and not self.is_current(replica):
                    self.settle(replica, "a replica holds newer weights")

    @property
    def settled_version(self) -> int | None:
        """The fleet's version; None while a replica may turn up that holds a newer one, after a restart of the
        gateway."""
        return self.version if self._has_committed or self.is_ready else None

    def _agree(self, joined: Sequence[Replica], *, is_open: bool) -> None:
        """Believe the labels of engines that joined, or not: the rule of `engines/weight_label.py`.

        A committed label that is the fleet's is what the engine holds. A newer one was committed before the gateway was
        restarted, and the fleet takes it over. Servers of others may have theirs from another run: they count where
        there are no engines of ours, and only while the fleet `is_open`, that is not complete yet. All else is unknown,
        and `CatchUp` brings these engines back; it also learns what they held before, from the store.
        """
        kinds = {group.kind for group in self.models.groups.values() if not group.frozen}
        joined = [replica for replica in joined if not replica.frozen]
        for replica in joined:
            found, is_ours = replica.found, replica.info.kind is not EngineKind.EXTERNAL
            served = version_of(found.committed)
            if found.is_committed and (is_ours or (is_open and kinds == {EngineKind.EXTERNAL})):
                self.learn(found.held)
            elif not found.is_committed and served > self._begun:
                self.spent = max(self.spent, served)  # before this gateway
        for replica in joined:
            if replica.found.is_committed and replica.found.held in (self.label, CHECKPOINT):
                replica.hold(replica.found.version, keeps_kv=True)

    def explain(self, replica: Replica, reason: str) -> None:
        """Change the reason of a replica's state."""
        replica.reason = reason

    def fence(self, replica: Replica, reason: str) -> None:
        """Stop serving from a replica with wrong weights; its rollouts are generated again elsewhere."""
        replica.lose_version()
        self.set_state(replica, ReplicaState.SYNCING, reason)
        replica.drop_calls(rollouts_alone=True)

    def settle(self, replica: Replica, reason: str) -> None:
        """SERVING where its weights are current, SYNCING where not; DRAINING where it is leaving."""
        if replica.is_leaving:
            self.set_state(replica, ReplicaState.DRAINING, _LEAVES)
            return
        current = self.is_current(replica)
        missing = self.missing_adapters(replica)
        if current and missing:
            current, reason = False, f"loads LoRA adapters: {', '.join(adapter.name for adapter in missing)}"
        elif not current and not replica.info.takes_weights:
            reason = (
                f"{replica.info.url} ({replica.info.engine_version}) cannot take weights: it holds those it came with, "
                f"and the fleet is at version {self.version}"
            )
        self.set_state(replica, ReplicaState.SERVING if current else ReplicaState.SYNCING, reason)

    async def _welcome(self, info: ReplicaInfo) -> Replica | None:
        """The replica that joins; None where it is refused, or does not answer yet."""
        before = self._replicas.get(info.replica_id)
        if before is not None:
            self.set_state(before, ReplicaState.LOST, "its engine was restarted")
        replica = await self.arrivals.welcome(info, self._listed | self._replicas.keys())
        if replica is not None:
            self._replicas[info.replica_id] = replica
        return replica

    async def _watch(self, replica: Replica) -> None:
        """Probe one replica until it is lost."""
        while replica.state is not ReplicaState.LOST:
            await asyncio.sleep(self._config.probe_interval_s)
            failure = await self.probes.probe(replica)
            if failure is None:
                failure = await self._standstill.look(replica)
            elif replica.brake.holders:
                replica.evidence.excuse()  # it is held, and so are its tokens; the holder bounds its own calls
            quiet_s = replica.evidence.quiet_s
            if failure is not None and replica.load_samples and quiet_s > self.probes.moves_after_s(replica):
                self.set_state(replica, ReplicaState.SUSPECT, str(failure))
                replica.drop_calls()  # its rollouts continue elsewhere
            if failure is None and replica.evidence.is_listed:
                self._vouched(replica)
            elif failure is None and replica.is_leaving:
                self.settle(replica, "")
            elif failure is None or self.probes.is_evidence(replica, failure):
                self.set_state(replica, ReplicaState.SUSPECT, str(failure) if failure else "Serve no longer lists it")
            self._lose_if_over(replica, failure)

    def _lose_if_over(self, replica: Replica, failure: Failure | None) -> None:
        if self.probes.is_lost(replica, failure):
            self.set_state(replica, ReplicaState.LOST, replica.reason)

    async def examine(self, replica: Replica, error: EngineError) -> bool:
        """Look at a replica on which an attempt failed. True if its engine process is gone.

        A connection that broke, or a 500, is no evidence by itself: a probe must fail too. A SUSPECT replica is probed
        again, as its engine may be ending, but not where it is silent, or stands still: its rollouts would wait for
        another silence.
        """
        if not isinstance(error, EngineUnreachable) and not (isinstance(error, EngineFailed) and error.status == 500):
            return False
        evidence = replica.evidence
        is_known = evidence.is_gone or evidence.is_silent or evidence.is_stalled
        may_be_ending = replica.state is ReplicaState.SUSPECT and not is_known
        if not (replica.can_serve or may_be_ending):
            return evidence.is_gone or isinstance(error, EngineGone)
        failure = error if isinstance(error, EngineGone) else await self.probes.probe_broken(replica)
        if failure is not None and replica.can_serve and self.probes.is_evidence(replica, failure):
            self.set_state(replica, ReplicaState.SUSPECT, str(failure))
            self._lose_if_over(replica, failure)
        return isinstance(failure, EngineGone)

    def _vouched(self, replica: Replica) -> None:
        if replica.state is not ReplicaState.SUSPECT:
            return
        state, reason = replica.evidence.before
        if state is ReplicaState.UPDATING:
            if self.update_to is not None:
                self.set_state(replica, ReplicaState.UPDATING, reason)
                return
            replica.lose_version()  # an update that it was part of ended without it
        self.settle(replica, reason if state is ReplicaState.SYNCING else "answers again")

    def _forget(self, replica: Replica) -> None:
        if self._replicas.get(replica.replica_id) is replica:
            del self._replicas[replica.replica_id]
        replica.brake.close()
        watcher = self._watchers.pop(replica, None)
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()
        closing = asyncio.create_task(replica.engine.close(), name=f"close {replica.replica_id}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
