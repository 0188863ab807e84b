"""Pauses the policy: a trainer stops generation, an update freezes engines while it overwrites them.

New rollouts wait at the scheduler's gate. Each replica's brake knows its holders; a trainer and an update are two of
them, and neither resumes an engine that the other holds.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from engines.errors import DeadlineExceeded, WeightUpdateConflict
from engines.types import InFlight, PauseMode
from gateway.config.schema import WeightsConfig
from gateway.fleet.brake import Holder
from gateway.fleet.concurrency import is_set_within
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import names, on_living
from gateway.weights.updates.record import UpdateRecord


class Pauses:
    """Stops the policy and lets it go on. Frozen rollouts keep their place; new ones wait at the gate."""

    def __init__(self, config: WeightsConfig, fleet: Fleet, scheduler: Scheduler) -> None:
        self._config = config
        self._fleet = fleet
        self._scheduler = scheduler
        self._cleared = False

    @property
    def is_paused(self) -> bool:
        """True while a trainer pauses the policy."""
        return Holder.TRAINER in self._scheduler.closed_for

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause for a trainer. Where a replica fails, nothing is paused but by an earlier pause.

        Refused as a whole where a serving replica cannot be paused; a replica that is behind has no rollouts.
        """
        was_paused, by = self.is_paused, Holder.TRAINER
        members = [replica for replica in self._fleet.updatable() if replica.can_serve or replica.info.has("/pause")]
        for replica in members:
            if not replica.info.has("/pause"):
                raise WeightUpdateConflict(f"replica {replica.replica_id} ({replica.info.url}) has no /pause")
        self._scheduler.close_gate(by)
        for replica in members if mode is PauseMode.ABORT else ():
            replica.expect_aborts()
        timeout_s = self._config.drain_timeout_s if mode is PauseMode.WAIT else self._config.control_timeout_s
        try:
            await on_living(
                members, lambda one: one.brake.stop(by, mode, clear_cache=clear_cache, timeout_s=timeout_s), timeout_s
            )
        except BaseException:
            if not was_paused:
                self._let_go(by)
            raise
        self._cleared = clear_cache

    async def resume(self) -> None:
        """End a trainer's pause. A replica that an update holds stays frozen until that lets go."""
        self._able("/resume")
        held = [replica for replica in self._fleet.trained_alive if Holder.TRAINER in replica.brake.holders]
        timeout_s = self._config.control_timeout_s
        try:
            if held:
                await on_living(held, lambda replica: replica.brake.release(Holder.TRAINER, timeout_s), timeout_s)
        finally:
            self._let_go(Holder.TRAINER)

    async def reset_prefix_cache(self) -> bool:
        """True when every replica of the policy that has the route forgot its prefixes.

        Versions never share prefixes, so this only frees memory. Prefixes of frozen models stay valid.
        """
        timeout_s, able = self._config.control_timeout_s, self._able("/reset_prefix_cache")
        reset = await on_living(able, lambda replica: replica.engine.reset_prefix_cache(timeout_s), timeout_s)
        return all(reset)

    def drains(self, update: UpdateRecord) -> bool:
        """True where an update waits for rollouts in flight. Those of a paused engine would not end."""
        return update.in_flight is InFlight.DRAIN and not self.is_paused

    def close_gate(self) -> None:
        """Place nothing until `end`."""
        self._scheduler.close_gate(Holder.UPDATE)

    async def drained(self, replica: Replica) -> None:
        """Wait for the end of the replica's rollouts."""
        timeout_s = self._config.drain_timeout_s
        if not await is_set_within(replica.idle, timeout_s):
            raise DeadlineExceeded(
                f"rollouts still run on {replica.replica_id} after {timeout_s:g} s: raise weights.drain_timeout_s, or "
                "choose another weights.in_flight"
            )

    def stopping(self, update: UpdateRecord) -> Callable[[Replica], Awaitable[None]]:
        """Close the gate, and return the call that stops a replica until its brake is released, or `end`.

        Under a trainer's pause its mode has decided about rollouts in flight.
        """
        self.close_gate()
        in_flight, timeout_s = update.in_flight, self._config.control_timeout_s
        if self.is_paused:
            update.keeps_kv, in_flight = not self._cleared, InFlight.KEEP
        elif in_flight is not InFlight.DRAIN:
            update.frozen_at = time.monotonic()

        async def hold(replica: Replica) -> None:
            if in_flight is InFlight.DRAIN and replica.idle.is_set():
                return  # else there are rollouts that a trainer's pause had held, and its end let go on
            clears = in_flight is not InFlight.KEEP
            await replica.brake.stop(Holder.UPDATE, PauseMode.KEEP, clear_cache=clears, timeout_s=timeout_s)

        return hold

    def end(self) -> None:
        """End all holds of the update and open the gate."""
        self._let_go(Holder.UPDATE)

    @asynccontextmanager
    async def answering(self, members: Sequence[Replica]) -> AsyncIterator[None]:
        """Has paused engines run during the block, as a paused engine answers no canary.

        The gate stays closed, and rollouts that end meanwhile wait for the verdict (`Replica.vouched`).
        """
        async with AsyncExitStack() as stack:
            lifts = (replica.brake.lifted(self._config.control_timeout_s) for replica in members)
            await asyncio.gather(*(stack.enter_async_context(lift) for lift in lifts))
            yield

    def _let_go(self, by: Holder) -> None:
        for replica in self._fleet.trained:
            replica.brake.let_go(by)
        self._scheduler.open_gate(by)

    def _able(self, route: str) -> list[Replica]:
        """The replicas that serve `route`. Raises `WeightUpdateConflict` where there are replicas, and none does."""
        alive = self._fleet.updatable()
        able = [replica for replica in alive if replica.info.has(route)]
        if alive and not able:
            raise WeightUpdateConflict(f"no replica has {route}: {names(alive)}")
        return able
