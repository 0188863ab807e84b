"""Measures of a fleet that loses replicas: the tokens that survive a death, and the goodput of whole batches."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loadtests.chaos.clients.callers import Callers
from loadtests.chaos.process_fleet import ProcessFleet

_LOOK_S = 0.05
_PLACED_S = 2.0
_REACHED_WITHIN_S = 240.0
_BATCH_LENGTHS = 40  # with 8 prompts each
_MEDIAN_TOKENS, _SPREAD, _LONGEST_TOKENS = 1000, 0.6, 4000
_HURT_AT = 0.25  # of the time of the longest completion


@dataclass(frozen=True, slots=True)
class Kept:
    """A death in the middle of a wave of equally long completions.

    `dead_tokens` were made by the replica until its death, `again` were made more than were delivered.
    """

    share: float
    seconds: float
    delivered: int
    dead_tokens: float
    again: float

    @property
    def kept(self) -> float:
        """Return the share of the dead replica's tokens that did not have to be made again."""
        return 1 - self.again / self.dead_tokens


@dataclass(frozen=True, slots=True)
class Goodput:
    """Seconds of one batch in the hurt fleet and in the undisturbed one beside it."""

    hurt_s: float
    calm_s: float
    tokens: int

    @property
    def ratio(self) -> float:
        return self.calm_s / self.hurt_s


async def kept_at(
    share: float, kill: Callable[[ProcessFleet, int], Awaitable[float]], fleet: ProcessFleet, callers: Callers
) -> Kept:
    """Kill the busiest replica when its samples have `share` of their tokens. `kill` returns what it had made."""
    began, made_before = time.monotonic(), await fleet.made()
    before = [await fleet.made_by(index) for index in range(fleet.size)]
    delivered_before = sum(tokens for _, tokens in callers.record.deliveries)
    each = fleet.size // 4 or 1
    kinds = (callers.trainer, callers.groups, callers.streamed, callers.chat)
    wave = [asyncio.create_task(kind()) for kind in kinds for _ in range(each)]
    victim = await _busiest(fleet)
    await _reached(share * callers.tokens, fleet, victim, before[victim])
    dead = await kill(fleet, victim) - before[victim]
    await asyncio.gather(*wave)
    seconds = time.monotonic() - began
    await fleet.complete()
    delivered = sum(tokens for _, tokens in callers.record.deliveries) - delivered_before
    return Kept(share, seconds, delivered, dead, await fleet.made() - made_before - delivered)


@dataclass(frozen=True, slots=True)
class Batches:
    """`count` batches one after the other, of which each `nth` is hurt. `lengths` are those of all, or are drawn."""

    hurt: Callable[[ProcessFleet], Awaitable[None]]
    count: int = 2
    nth: int = 1
    lengths: tuple[int, ...] = ()

    async def run(self, number: int, fleet: ProcessFleet, callers: Callers, calm: Callers, step_s: float) -> Goodput:
        """Run a batch in both fleets at once. One of them is hurt in the batch's first half, if it is its turn."""
        lengths = self.lengths or _lengths(seed=len(callers.record.deliveries))
        running = [_timed(callers, lengths), _timed(calm, lengths)]
        if self.is_hurt(number):
            running.append(_later(self.hurt, fleet, _HURT_AT * max(lengths) * step_s))
        hurt_s, calm_s, *_ = await asyncio.gather(*running)
        return Goodput(hurt_s, calm_s, 8 * sum(lengths))

    def is_hurt(self, number: int) -> bool:
        """Return True if this batch is hurt; numbers begin with 1."""
        return number % self.nth == 0


async def kill_one(fleet: ProcessFleet) -> None:
    await fleet.kill(0)


async def stop_one(fleet: ProcessFleet) -> None:
    """Stop an engine; `go_on` ends that."""
    await fleet.suspend(0)


def go_on(fleet: ProcessFleet) -> None:
    fleet.go_on()


async def _busiest(fleet: ProcessFleet) -> int:
    """Return the replica with the most samples, once all are placed."""
    await asyncio.sleep(_PLACED_S)
    running = [(await fleet.load_of(index)).running for index in range(fleet.size)]
    return running.index(max(running))


async def _reached(tokens: float, fleet: ProcessFleet, victim: int, before: float) -> None:
    """Return when the running samples of a replica have so many tokens each."""
    async with asyncio.timeout(_REACHED_WITHIN_S):
        while True:
            load = await fleet.load_of(victim)
            if load.running and (load.generated - before) / load.running >= tokens:
                return
            await asyncio.sleep(_LOOK_S)


def _lengths(seed: int) -> list[int]:
    """Return lengths as reasoning models have them: many short ones, a long tail, a limit."""
    draw = random.Random(seed)
    lengths = (round(_MEDIAN_TOKENS * draw.lognormvariate(0, _SPREAD)) for _ in range(_BATCH_LENGTHS))
    return [min(max(length, 50), _LONGEST_TOKENS) for length in lengths]


async def _timed(callers: Callers, lengths: Sequence[int]) -> float:
    began = time.monotonic()
    await callers.batch(lengths)
    return time.monotonic() - began


async def _later(hurt: Callable[[ProcessFleet], Awaitable[None]], fleet: ProcessFleet, seconds: float) -> float:
    await asyncio.sleep(seconds)
    await hurt(fleet)
    return seconds
