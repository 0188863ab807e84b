"""Whether the policy's engines make tokens: a trainer pauses them, an update freezes them while it overwrites them."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from engines.errors import WeightUpdateConflict
from engines.types import InFlight, PauseMode
from gateway.config.schema import WeightsConfig
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.fleet.replica_calls import names, on_all, on_living, try_on_all
from gateway.fleet.scheduler import Scheduler
from gateway.weights.updates.record import WeightUpdate

_UPDATE = "weight update"
_PAUSE = "pause"
_AGAIN_S = 0.2
_GRACE_S = 5.0


class Pauses:
    """Stops the policy and lets it go on. What is frozen keeps its place; new rollouts wait at the gate."""

    def __init__(self, config: WeightsConfig, fleet: Fleet, scheduler: Scheduler) -> None:
        self._config = config
        self._fleet = fleet
        self._scheduler = scheduler
        self._paused: PauseMode | None = None
        self._cleared = False
        self._frozen: tuple[Replica, ...] = ()

    @property
    def is_paused(self) -> bool:
        """Whether a trainer has paused it."""
        return self._paused is not None

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop the policy's generation everywhere; its new rollouts wait in the queue.

        Refused as a whole where a replica that may have rollouts cannot be paused. One that is left behind by the
        fleet's weights has none, and is not asked.
        """
        members = [replica for replica in self._fleet.updatable() if replica.can_serve or replica.info.has("/pause")]
        for replica in members:
            if not replica.info.has("/pause"):
                raise WeightUpdateConflict(f"replica {replica.replica_id} ({replica.info.url}) has no /pause")
        if self._fleet.rolling_to is not None:
            raise WeightUpdateConflict(
                f"/pause during the rolling update to version {self._fleet.rolling_to}, whose replicas have to answer: "
                "wait for its end"
            )
        self._scheduler.close_gate(_PAUSE)
        self._paused, self._cleared = mode, clear_cache
        timeout_s = self._config.drain_timeout_s if mode is PauseMode.WAIT else self._config.control_timeout_s
        await on_all(
            members,
            lambda replica: replica.engine.pause(mode, clear_cache=clear_cache, timeout_s=timeout_s),
            timeout_s,
        )

    async def resume(self) -> None:
        """End a trainer's pause."""
        timeout_s = self._config.control_timeout_s
        await on_all(self._able("/resume"), lambda replica: replica.engine.resume(timeout_s), timeout_s)
        self._paused = None
        self._scheduler.open_gate(_PAUSE)

    async def reset_prefix_cache(self) -> bool:
        """True when every replica of the policy that can forgot its prefixes.

        Versions never share prefixes, so this only frees memory. A frozen model's prefixes stay as good as they are.
        """
        timeout_s, able = self._config.control_timeout_s, self._able("/reset_prefix_cache")
        return all(await on_all(able, lambda replica: replica.engine.reset_prefix_cache(timeout_s), timeout_s))

    def in_flight(self, members: Sequence[Replica], asked: InFlight | None) -> InFlight:
        """What an update does to rollouts in flight: as asked, else as configured where all engines can be paused."""
        unable = next((replica for replica in members if not replica.info.has("/pause")), None)
        if unable is None or asked is InFlight.DRAIN:
            return asked or self._config.in_flight
        if asked is not None:
            raise WeightUpdateConflict(
                f"in_flight = {asked.value!r}, but replica {unable.replica_id} ({unable.info.url}) has no /pause: use "
                "'drain', which waits for rollouts in flight"
            )
        return InFlight.DRAIN

    async def drain(self) -> None:
        """Hold new rollouts back and wait for those in flight."""
        self._scheduler.close_gate(_UPDATE)
        await self._scheduler.drained(self._config.drain_timeout_s)

    async def freeze(self, update: WeightUpdate, members: Sequence[Replica]) -> None:
        """From here on none of these replicas makes a token, until the update lets it."""
        self._scheduler.close_gate(_UPDATE)
        if self.is_paused:
            update.keeps_kv = not self._cleared
            return
        if update.in_flight is InFlight.DRAIN:
            return
        timeout_s, clears = self._config.control_timeout_s, update.in_flight is InFlight.RECOMPUTE
        self._frozen, update.frozen_at = tuple(members), time.monotonic()

        async def stop(replica: Replica) -> None:
            if update.in_flight is InFlight.ABORT:
                await cut_off(replica, timeout_s)
            else:
                await replica.engine.pause(PauseMode.KEEP, clear_cache=clears, timeout_s=timeout_s)

        await on_living(members, stop, timeout_s)

    async def thaw(self, update: WeightUpdate) -> None:
        """Have the engines go on, with the new weights. What they make is delivered once the update is committed."""
        members, self._frozen = self._frozen, ()
        if not members:
            return
        timeout_s = self._config.control_timeout_s
        await on_living(members, lambda replica: replica.engine.resume(timeout_s), timeout_s)
        update.go_on()

    def end(self) -> None:
        """The update is over: new rollouts are placed again."""
        self._scheduler.open_gate(_UPDATE)

    async def thaw_untouched(self) -> None:
        """After an update that failed, have those go on where they were that it did not overwrite. Whoever is brought
        back goes on when that has begun."""
        untouched = [replica for replica in self._frozen if replica.weight_version is not None]
        self._frozen = ()
        await try_on_all(untouched, lambda engine: engine.resume(self._config.control_timeout_s))

    @asynccontextmanager
    async def answering(self, members: Sequence[Replica]) -> AsyncIterator[None]:
        """A paused engine answers nothing. So it goes on for the moment of a question, with its new weights.

        The gate stays closed, and what ends meanwhile is held back until the update is over (`Replica.vouched`).
        """
        if not self.is_paused:
            yield
            return
        timeout_s = self._config.control_timeout_s
        await try_on_all(members, lambda engine: engine.resume(timeout_s))
        try:
            yield
        finally:
            await try_on_all(
                members, lambda engine: engine.pause(PauseMode.KEEP, clear_cache=False, timeout_s=timeout_s)
            )

    def _able(self, route: str) -> list[Replica]:
        """Those of the policy that serve `route`. Raises `WeightUpdateConflict` where some are there, but none does."""
        alive = self._fleet.updatable()
        able = [replica for replica in alive if replica.info.has(route)]
        if alive and not able:
            raise WeightUpdateConflict(f"no replica has {route}: {names(alive)}")
        return able


async def cut_off(replica: Replica, timeout_s: float) -> None:
    """Returns when nothing is in flight on the replica, whose engine is paused from then on; bounded by the caller.

    A request that was on its way when the engine stopped waits there unread: it is ended with another call, or, where
    the engine does not look at those either, left behind after some seconds and begun again elsewhere.
    """
    replica.cuts_off = True
    try:
        grace_ends = time.monotonic() + _GRACE_S
        while True:
            await replica.engine.pause(PauseMode.ABORT, clear_cache=False, timeout_s=timeout_s)
            if await _is_idle(replica):
                return
            if time.monotonic() > grace_ends:
                replica.drop_calls()
    finally:
        replica.cuts_off = False


async def _is_idle(replica: Replica) -> bool:
    try:
        async with asyncio.timeout(_AGAIN_S):
            await replica.idle.wait()
    except TimeoutError:
        return False
    return True
