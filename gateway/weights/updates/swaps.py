"""The loop that brings an update's version to replicas: each is stopped, overwritten, verified.

An update at once has one turn of all its members, with the gate closed. A rolling update has turns of
`weights.rolling_width` replicas, never of all that serve, with the gate open: those that passed serve the version
ahead of the others.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from engines.errors import DeadlineExceeded, EngineError, WeightUpdateFailed
from engines.types import InFlight, ReplicaState
from gateway.fleet.brake import Holder
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import is_dead, on_one
from gateway.fleet.together import together
from gateway.weights.snapshots import bounded
from gateway.weights.updates.parts import Parts
from gateway.weights.updates.record import Phase, WeightUpdate
from gateway.weights.verdicts import UNASKED, Finding, Result, ended_by

log = structlog.get_logger()

Load = Callable[[Replica], Awaitable[None]]
Prepare = Callable[[Sequence[Replica]], Awaitable[Sequence[Replica]]]

_ON_ITS_WAY = (ReplicaState.UPDATING, ReplicaState.SUSPECT)
_GONE = (ReplicaState.DRAINING, ReplicaState.LOST)
# If two replicas disagree, neither is known to be right: a rolling update tolerates no failure before two have passed.
_WITNESSES = 2
_FORGET_S = 5.0
"""Longest wait until no request holds the KV of refused weights."""
_HOPED = Finding(Result.UNVERIFIED)


class Swaps:
    """The turns of one update."""

    def __init__(
        self,
        parts: Parts,
        update: WeightUpdate,
        members: Sequence[Replica],
        load: Load,
        prepare: Prepare | None = None,
    ) -> None:
        """`load` has one replica load the version; `prepare` reads it ahead while these replicas serve, and
        returns those that have answered."""
        self._parts = parts
        self._update = update
        self._members = members
        self._load = load
        self._prepare = prepare
        self._turn: Sequence[Replica] = ()
        self._ready = members
        self._findings: dict[Replica, Finding] = {}
        self._errors: dict[Replica, WeightUpdateFailed | DeadlineExceeded] = {}

    async def run(self) -> Mapping[Replica, Finding]:
        """Return a finding for each replica that had a turn; a death ends nothing, as a successor catches up.

        Raise `WeightUpdateFailed` or `DeadlineExceeded` as soon as more fail than `weights.must_pass` tolerates.
        """
        while turn := await self._next():
            await self._take(turn)
        if not self._findings:
            raise WeightUpdateFailed("no replica serves any more: see /health")
        return self._findings

    async def _next(self) -> list[Replica]:
        """Return the replicas of the next turn; of a rolling update the least loaded, and never all that serve."""
        if not self._update.rolling:
            return [replica for replica in self._members if replica not in self._findings]
        if not self._behind():
            # A replica that stays silent catches up when it answers again.
            await self._parts.fleet.settled_within(self._parts.config.control_timeout_s)
        serving = sum(replica.can_serve for replica in self._parts.fleet.trained)
        width = min(self._parts.config.rolling_width, max(serving - 1, 1))
        return sorted(self._behind(), key=lambda replica: replica.load_tokens)[:width]

    def _behind(self) -> list[Replica]:
        """Return the serving replicas that have not had their turn in a rolling update; a replica has one turn."""
        return [
            replica
            for replica in self._parts.fleet.trained
            if replica.can_serve
            and replica.weight_version != self._update.version
            and replica.info.loads_snapshots
            and replica not in self._findings
            and not self._parts.catch_up.is_busy_with(replica)
        ]

    async def _take(self, turn: Sequence[Replica]) -> None:
        """Have these replicas load the version together, generate, and answer the canary. They are stopped for it,
        unless they are overwritten already. In a rolling update they serve then."""
        update, config = self._update, self._parts.config
        if self._prepare is not None:
            with update.timed("prepare"):
                update.receivers = (*update.receivers, *turn)
                self._ready = await self._prepare(turn)
        if not (turn := self._leave(turn)):
            return  # they have left meanwhile
        self._turn, began = turn, time.monotonic()
        replicas = turn if update.overwrites else await self._overwritten(turn)
        with update.timed("load"):
            replicas = await self._on_each(replicas, lambda one: on_one(one, self._load, config.load_timeout_s))
            replicas = await self._on_each(replicas, lambda one: on_one(one, self._release, config.control_timeout_s))
        update.go_on()
        with update.timed("canary"):
            await self._verify(replicas)
        if update.rolling:
            await self._serve_ahead(began)
            update.receivers = self._unused()

    def _unused(self) -> tuple[Replica, ...]:
        """Return the replicas of earlier turns that have read the version ahead, and serve on without it."""
        others = (None, self._update.version)
        return tuple(replica for replica in self._update.receivers if replica.weight_version not in others)

    def _leave(self, turn: Sequence[Replica]) -> Sequence[Replica]:
        """Place no more rollouts on the turn of a rolling update. Return its replicas that are still there."""
        if not self._update.rolling:
            return turn
        turn = [replica for replica in turn if replica.can_serve]
        for replica in turn:
            self._parts.fleet.set_state(replica, ReplicaState.UPDATING, f"leaves for version {self._update.version}")
        return turn

    async def _overwritten(self, replicas: Sequence[Replica]) -> Sequence[Replica]:
        """Stop these replicas, around their rollouts or after them. Return those that are there and stand still.

        Only then their versions are forgotten: tokens until then are of these.
        """
        update, config, pauses = self._update, self._parts.config, self._parts.pauses
        await self._parts.catch_up.settled(replicas, config.control_timeout_s)
        stop = pauses.stopping(update)
        if pauses.drains(update):
            with update.timed("drain"):
                replicas = await self._on_each(replicas, pauses.drained)
        with update.timed("abort" if update.in_flight is InFlight.ABORT else "load"):
            replicas = await self._on_each(replicas, lambda one: on_one(one, stop, config.control_timeout_s))
        for replica in replicas:
            if not self._is_there(replica):
                self._find(replica, Finding(Result.LOST, f"it left: {replica.reason}"))
        replicas = [replica for replica in replicas if replica not in self._findings]
        served = self._parts.fleet.version
        # A replica that is behind has other weights to keep; one that is not ready may have kept older weights.
        ready = [replica for replica in self._ready if replica in replicas]
        update.kept = {replica: served for replica in ready if replica.weight_version == served}
        self._parts.fleet.overwrite(replicas, update.version)
        await self._parts.fleet.changes.taken()
        update.enter(Phase.RECEIVING)
        return replicas

    async def _release(self, replica: Replica) -> None:
        """Have a replica generate with its new weights. Its tokens are delivered after the verdict."""
        await replica.brake.release(Holder.UPDATE, self._parts.config.control_timeout_s)
        if replica.was_unknown:
            await self._forget_kv(replica)

    async def _forget_kv(self, replica: Replica) -> None:
        """Empty the KV of refused weights, unless requests hold it that are none of ours, as on an external server. The
        canary finds weights that give NaN."""
        try:
            await bounded(self._parts.catch_up.forget_kv(replica), _FORGET_S, "requests hold its KV cache")
        except (EngineError, DeadlineExceeded) as error:
            log.warning("KV of refused weights is left", replica=replica.replica_id, error=str(error))

    async def _verify(self, replicas: Sequence[Replica]) -> None:
        """Find out by the canary which weights these replicas hold."""
        self._update.enter(Phase.VERIFYING)
        for replica, finding in (await self._canary(replicas)).items():
            self._find(replica, finding)
        self._check()

    async def _canary(self, replicas: Sequence[Replica]) -> Mapping[Replica, Finding]:
        canary, update = self._parts.canary, self._update
        if not canary.is_enabled:
            return dict.fromkeys(replicas, UNASKED)
        if not replicas:
            return {}
        async with self._parts.pauses.answering(replicas):
            busy = any(not replica.idle.is_set() for replica in replicas)
            return await canary.check(replicas, update.version, trainers=update.canary_logprobs, busy=busy)

    async def _serve_ahead(self, began: float) -> None:
        """Serve the version on those of the turn that passed, and leave the others out."""
        update, fleet = self._update, self._parts.fleet
        passed = [replica for replica in self._turn if self._findings[replica].may_serve]
        if passed:  # not before: an update that is aborted in its first turn leaves its number to the next
            self._parts.canary.accept_part()
        for replica in self._turn:
            update.replicas[replica.replica_id]["away_s"] = round(time.monotonic() - began, 4)
            if not self._is_there(replica):
                continue
            if replica in passed:
                fleet.serve_ahead(replica, update.version, keeps_kv=update.keeps_kv)
            else:
                self._leave_out(replica, self._findings[replica])

    def _leave_out(self, replica: Replica, finding: Finding) -> None:
        """Bring a replica back that failed in its turn. It serves on where it was not overwritten yet."""
        reason = f"did not take version {self._update.version}: {finding.reason}"
        if replica.weight_version is None or finding.result is Result.LOST:
            self._parts.catch_up.bring_back([replica])
            self._parts.fleet.fence(replica, reason)
        else:
            self._parts.fleet.settle(replica, f"serves on: {reason}")
        replica.brake.let_go(Holder.UPDATE)

    def _is_there(self, replica: Replica) -> bool:
        """Return False for a replica that has left: lost, being removed, or fenced in its turn."""
        return replica.state in _ON_ITS_WAY if self._update.rolling else replica.state not in _GONE

    async def _on_each(self, replicas: Sequence[Replica], call: Load) -> Sequence[Replica]:
        """Make a bounded call on all at the same time. Return those where it succeeded; the others have a finding."""

        async def attempt(replica: Replica) -> None:
            try:
                await call(replica)
            except (WeightUpdateFailed, DeadlineExceeded) as error:
                died = isinstance(error, WeightUpdateFailed) and await is_dead(replica)
                self._errors[replica] = error
                self._find(replica, Finding(Result.LOST if died else Result.FAILED, str(error)))
                self._check()

        await together(attempt(replica) for replica in replicas)
        return [replica for replica in replicas if replica not in self._findings]

    def _find(self, replica: Replica, finding: Finding) -> None:
        self._findings[replica] = finding
        self._update.replicas[replica.replica_id] = {"canary": finding.report()}

    def _check(self) -> None:
        """Raise where the update ends here, even if the rest of the turn passes."""
        update, config = self._update, self._parts.config
        findings = {**dict.fromkeys(self._turn, _HOPED), **self._findings}
        waiting, witnesses = (len(self._behind()), _WITNESSES) if update.rolling else (0, 0)
        culprit = ended_by(config, findings, waiting=waiting, witnesses=witnesses)
        if culprit is None:
            return
        if not update.rolling and culprit in self._errors:
            raise self._errors[culprit]
        failed = [finding for finding in self._findings.values() if not finding.may_serve]
        raise WeightUpdateFailed(
            f"{len(failed)} of {len(self._findings)} replicas failed to take version {update.version} "
            f"(weights.must_pass: {config.must_pass}); replica {culprit.replica_id}: "
            f"{self._findings[culprit].reason}; {len(self._findings) - len(failed)} replicas had taken the version and "
            "are restored",
            replica_id=culprit.replica_id,
        )
