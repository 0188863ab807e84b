"""The loop over the attempts of one rollout: each on one replica, until one delivers or there may be no further one."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import TypeVar

from engines.engine import Json
from engines.errors import (
    DeadlineExceeded,
    EngineError,
    EngineFailed,
    EngineGone,
    EngineRefused,
    EngineUnreachable,
)
from gateway.config.schema import GatewayConfig
from gateway.fleet.placement.attempts import End, end_of
from gateway.fleet.placement.lengths import Lengths
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.replica import Replica

T = TypeVar("T")

# Engines that die at once are all known to be dead after this time, and a prompt does not meet two of them.
_AFTER_DEATH_S = 1.0
_FAULT = 500
_OTHER: Json = {"prompt": [1], "max_tokens": 1}
_OTHER_TIMEOUT_S = 10.0
_NO_TURN = nullcontext()


async def _serves_others(replica: Replica) -> bool:
    """True if the engine makes a token for another request: it is neither dying nor in an update."""
    try:
        await replica.unless_lost(replica.engine.generate("/v1/completions", _OTHER, _OTHER_TIMEOUT_S))
    except (EngineError, DeadlineExceeded):
        return False
    return replica.can_serve


async def _answer(replica: Replica, call: Callable[[Replica], Awaitable[T]]) -> T:
    """Return the call's result. An error that the engine answers while an update overwrites it waits for the verdict:
    weights that are refused may be its cause, as NaN is of vLLM's 400, and it is `EngineOverwritten` then."""
    try:
        return await replica.unless_lost(call(replica))
    except (EngineRefused, EngineFailed):
        await replica.unless_lost(replica.vouched())
        raise


class AttemptLoop(ABC):
    """Runs rollouts on the replicas that its subclass places them on.

    `lengths` has the expected lengths of samples by their prompts.
    """

    lengths: Lengths

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config

    @abstractmethod
    def served_version(self, model: str) -> int:
        """The version that a reply without tokens names."""

    @abstractmethod
    def delivered(self, rollout: Rollout, prompt_tokens: int, completion_tokens: int) -> None:
        """Learn from a rollout that was delivered whole."""

    @abstractmethod
    def withdraw(self, picks: Callable[[Rollout], bool]) -> None:
        """End rollouts that wait for a replica, or are between two attempts, with `Withdrawn`."""

    def turn(self, rollout: Rollout) -> AbstractContextManager[None]:
        """Surround all attempts of a rollout."""
        return _NO_TURN

    @abstractmethod
    def placed(self, rollout: Rollout) -> AbstractAsyncContextManager[Replica]:
        """Wait for a replica with room. The block is an attempt there; its end gives the room back."""

    @abstractmethod
    def between_attempts(self, rollout: Rollout) -> AbstractContextManager[None]:
        """Raises `Withdrawn` at the end of the block where the rollout was withdrawn in it."""

    @abstractmethod
    async def judged(self, rollout: Rollout, replica: Replica, end: End, error: EngineError) -> bool:
        """Draw the conclusions from an attempt that failed. True if the replica's engine is dead."""

    async def run(
        self, rollout: Rollout, call: Callable[[Replica], Awaitable[T]], kept: Callable[[EngineError], bool]
    ) -> T | None:
        """The call's result from the first replica that gives one.

        `kept` is True where a failed call has something that continues elsewhere; there is no result then.
        """
        with self.turn(rollout):
            while True:
                try:
                    async with self.placed(rollout) as replica:
                        result = await _answer(replica, call)
                        replica.backoff.succeeded()
                        return result
                except EngineError as error:
                    progressed = kept(error)
                    with self.between_attempts(rollout):
                        await self._failed(rollout, replica, error, progressed=progressed)
                    if progressed:
                        return None

    async def _failed(self, rollout: Rollout, replica: Replica, error: EngineError, *, progressed: bool) -> None:
        """Record the end of an attempt. Raises if there may be no further attempt.

        The rest of a sample is refused by this replica alone: another has taken the whole request.
        """
        end = end_of(error, cuts_off=replica.is_cut_off(error))
        if end is End.CUT_OFF and isinstance(error, EngineUnreachable):
            end = rollout.attempts.lost_in_update()
        if end is End.REFUSED and not rollout.goes_on:
            raise error
        is_dead = await self.judged(rollout, replica, end, error)
        if end is End.CUT_OFF:
            return
        if end in (End.FAILED, End.REFUSED):
            if isinstance(error, EngineFailed) and error.status == _FAULT and not rollout.goes_on:
                rollout.attempts.faults += await _serves_others(replica)
            died = is_dead and not isinstance(error, EngineGone)  # else it was dead before it got the prompt
            rollout.attempts.failed(replica.replica_id, died=died, progressed=progressed)
            if died and not progressed:
                await asyncio.sleep(_AFTER_DEATH_S)
        rollout.attempts.check(error, max_attempts=self._config.max_attempts, longest_s=self._config.generate_timeout_s)
