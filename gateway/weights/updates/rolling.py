"""A rolling update: replica after replica leaves, loads the new version from the store, is checked, and serves again.

Generation never stops, and the fleet holds both versions meanwhile. This file decides if a failure ends the update;
`catch_up.py` then restores the replicas that had taken the version.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from engines.errors import DeadlineExceeded, EngineError, EngineUnreachable, WeightUpdateFailed
from engines.types import InFlight, ReplicaState
from gateway.fleet.brake import Holder
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import prepare_all
from gateway.fleet.stopped import stopped
from gateway.weights.snapshots import bounded
from gateway.weights.updates.parts import Parts
from gateway.weights.updates.record import WeightUpdate
from gateway.weights.verdicts import Finding, Result, ended_by

log = structlog.get_logger()

_ON_ITS_WAY = (ReplicaState.UPDATING, ReplicaState.SUSPECT)
# If two replicas disagree, neither is known to be right: no failure is tolerated before two replicas have passed.
_WITNESSES = 2


class Rolling:
    """Rolls updates through the fleet, `weights.rolling_width` replicas at a time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def take(
        self, update: WeightUpdate, path: Path, canary_logprobs: Sequence[float] | None
    ) -> dict[Replica, Finding]:
        """Load the version in folder `path` on every serving replica. Return a finding for each.

        A replica that dies is left out: its successor catches up. Raise `WeightUpdateFailed` where more replicas fail
        than `weights.must_pass` tolerates.
        """
        findings: dict[Replica, Finding] = {}
        while batch := await self._next(update, findings):
            await prepare_all(batch, str(path), update.version, self._parts.config.load_timeout_s)
            if not (batch := [replica for replica in batch if replica.can_serve]):
                continue  # they have left meanwhile
            for replica in batch:
                self._parts.fleet.set_state(replica, ReplicaState.UPDATING, f"leaves for version {update.version}")
            began = time.monotonic()
            findings |= await self._turn(update, batch, path, canary_logprobs)
            for replica in batch:
                away_s = round(time.monotonic() - began, 4)
                update.replicas[replica.replica_id] = {"canary": findings[replica].report(), "away_s": away_s}
            self._check_failures(findings, waiting=len(self._behind(update, findings)))
        if not findings:
            raise WeightUpdateFailed("no replica serves any more: see /health")
        return findings

    def _behind(self, update: WeightUpdate, findings: Mapping[Replica, Finding]) -> list[Replica]:
        """Return the serving replicas that have not had their turn; a replica has one turn."""
        return [
            replica
            for replica in self._parts.fleet.trained
            if replica.can_serve
            and replica.weight_version != update.version
            and replica.info.loads_snapshots
            and replica not in findings
            and not self._parts.catch_up.is_busy_with(replica)
        ]

    async def _next(self, update: WeightUpdate, findings: Mapping[Replica, Finding]) -> list[Replica]:
        """Return the next replicas to update: the least loaded first, and never all that serve."""
        if not self._behind(update, findings):
            # A replica that stays silent catches up when it answers again.
            await self._parts.fleet.settled_within(self._parts.config.control_timeout_s)
        serving = sum(replica.can_serve for replica in self._parts.fleet.trained)
        width = min(self._parts.config.rolling_width, max(serving - 1, 1))
        return sorted(self._behind(update, findings), key=lambda replica: replica.load_tokens)[:width]

    async def _turn(
        self, update: WeightUpdate, batch: Sequence[Replica], path: Path, canary_logprobs: Sequence[float] | None
    ) -> dict[Replica, Finding]:
        """Load and check the version on a batch, which then serves again or is fenced. Return a finding for each."""
        async with asyncio.TaskGroup() as tasks:
            loads = {replica: tasks.create_task(self._load(update, replica, path)) for replica in batch}
        findings = {replica: found for replica, load in loads.items() if (found := load.result()) is not None}
        loaded = [replica for replica in batch if replica not in findings]
        if loaded:
            with update.timed("canary"):
                findings |= await self._verify(update, loaded, canary_logprobs)
        passed = [replica for replica in loaded if findings[replica].may_serve]
        # Before tokens are delivered: a restarted gateway must not use the number again.
        await self._parts.snapshots.note_holders(update.version, passed)
        passed = [replica for replica in passed if replica.state in _ON_ITS_WAY]
        for replica in batch:
            if replica in passed:
                self._parts.fleet.serve_ahead(replica, update.version, keeps_kv=update.keeps_kv)
            elif replica.state in _ON_ITS_WAY:
                self._parts.fleet.fence(replica, f"did not take version {update.version}: {findings[replica].reason}")
        return findings

    async def _load(self, update: WeightUpdate, replica: Replica, path: Path) -> Finding | None:
        """Have a replica load, around its rollouts or after them. Return a finding if it did not load."""
        if update.in_flight is InFlight.DRAIN and (late := await self._drained(update, replica)):
            return late
        if replica.state not in _ON_ITS_WAY:
            return Finding(Result.LOST, f"it left: {replica.reason}")
        try:
            await replica.unless_lost(self._stop_and_load(update, replica, path))
        except EngineUnreachable as error:
            return Finding(Result.LOST, str(error))
        except (EngineError, DeadlineExceeded) as error:
            return Finding(Result.FAILED, str(error))
        return None

    async def _drained(self, update: WeightUpdate, replica: Replica) -> Finding | None:
        """Wait until the replica has no rollouts. Return a finding if they do not end in time."""
        timeout_s = self._parts.config.drain_timeout_s
        with update.timed("drain"):
            try:
                async with asyncio.timeout(timeout_s):
                    await replica.idle.wait()
            except TimeoutError:
                self._parts.fleet.settle(replica, "serves on: its rollouts did not end")
                return Finding(
                    Result.FAILED,
                    f"its rollouts did not end within {timeout_s:g} s (weights.drain_timeout_s)",
                )
        return None

    async def _stop_and_load(self, update: WeightUpdate, replica: Replica, path: Path) -> None:
        """Stop the replica, and load."""
        config, in_flight = self._parts.config, update.in_flight
        stops = stopped(replica, by=Holder.UPDATE, in_flight=in_flight, timeout_s=config.control_timeout_s)
        async with AsyncExitStack() as stack:
            with update.timed("abort" if in_flight is InFlight.ABORT else "load"):
                stopping = stack.enter_async_context(stops)
                await bounded(stopping, config.control_timeout_s, "its rollouts did not stop")
            replica.overwrite()  # only once it stands still: its tokens until then are of its version
            with update.timed("load"):
                await self._load_snapshot(update, replica, path)

    async def _load_snapshot(self, update: WeightUpdate, replica: Replica, path: Path) -> None:
        timeout_s = self._parts.config.load_timeout_s
        try:
            await self._parts.snapshots.note_overwritten([replica])
            load = replica.engine.load_snapshot(str(path), update.version, timeout_s)
            await bounded(load, timeout_s, f"it did not load {path}")
        except BaseException as error:
            if replica.state in _ON_ITS_WAY:  # its engine resumes now, with a mixture of versions
                self._parts.fleet.fence(
                    replica, f"did not take version {update.version}: {str(error) or type(error).__name__}"
                )
            raise

    async def _verify(
        self, update: WeightUpdate, loaded: Sequence[Replica], canary_logprobs: Sequence[float] | None
    ) -> dict[Replica, Finding]:
        if not self._parts.canary.is_enabled:
            return dict.fromkeys(loaded, Finding(Result.UNVERIFIED, "weights.canary.enabled is false"))
        busy = any(not replica.idle.is_set() for replica in loaded)
        findings = await self._parts.canary.check(loaded, update.version, trainers=canary_logprobs, busy=busy)
        self._parts.canary.accept_part()
        return findings

    def _check_failures(self, findings: Mapping[Replica, Finding], waiting: int) -> None:
        """Raise where the update ends here; `waiting` replicas may still pass."""
        replica = ended_by(self._parts.config, findings, waiting=waiting, witnesses=_WITNESSES)
        if replica is None:
            return
        passed = sum(finding.may_serve for finding in findings.values())
        raise WeightUpdateFailed(
            f"the rolling update ended at replica {replica.replica_id}: {findings[replica].reason} (weights.must_pass: "
            f"{self._parts.config.must_pass}); {passed} replicas had taken the version and are restored",
            replica_id=replica.replica_id,
        )
