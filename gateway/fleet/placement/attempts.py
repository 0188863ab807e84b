"""The attempts of one rollout: how each ended, and whether another may begin."""

import asyncio
import time
from enum import StrEnum

from msgspec import Struct, field

from engines.errors import (
    DeadlineExceeded,
    DeadlyPrompt,
    EngineError,
    EngineFailed,
    EngineOverwritten,
    EngineRefused,
    InvalidRequest,
)

# Statuses below 500 that say nothing about the prompt: a wrong key, a missing model or route, a slow read.
_REPLICAS_FAULT = (401, 403, 404, 408)
_BUSY = 429
_DEATHS = 2
_FAULTS = 2
# Losses of engines that updates overwrote meanwhile. The prompt may be at fault for more: it meets that rarely.
_LOST_IN_UPDATES = 3


class End(StrEnum):
    """How an attempt ended: what its record, its span, the metrics and the next attempt go by."""

    ANSWERED = "answered"
    REFUSED = "refused"  # the request is at fault; a rest is taken elsewhere, as its first part was
    FAILED = "failed"  # the replica is at fault
    BUSY = "busy"  # the replica has no room, or did not accept the connection
    CUT_OFF = "cut off"  # by a weight update
    EXPIRED = "expired"
    LEFT = "given up by the client"


RETRIED = (End.FAILED, End.BUSY, End.CUT_OFF)
"""The ends that another attempt may follow, whatever the request."""


class Attempts(Struct):
    """The failed attempts of a rollout. Bounded by number, as long as no attempt adds a token, and by time.

    `avoid` has incarnations of replicas that failed, and ids of those that died without a token: a deadly prompt meets
    no standby. `failures` and `deaths` count attempts in a row without a token, `without_tokens` as if the last had
    added none; `losses_in_updates` counts engines that were lost in an update, `faults` answers of 500 by engines that
    serve others.
    """

    avoid: frozenset[str] = frozenset()
    failures: int = 0
    deaths: int = 0
    without_tokens: tuple[int, int] = (0, 0)
    losses_in_updates: int = 0
    faults: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def failed(self, replica_id: str, incarnation: str, *, died: bool, progressed: bool) -> None:
        """Record an attempt that ended by the replica's fault; `died` if its engine process is gone."""
        self.avoid |= {replica_id, incarnation} if died and not progressed else {incarnation}
        self.without_tokens = (self.failures + 1, self.deaths + died)
        self.failures, self.deaths = (0, 0) if progressed else self.without_tokens

    def lost_in_update(self) -> End:
        """Record the loss of an engine that an update overwrote, and return how the attempt ended: an update is held to
        be at fault, and not the prompt, for the first three."""
        self.losses_in_updates += 1
        return End.CUT_OFF if self.losses_in_updates <= _LOST_IN_UPDATES else End.FAILED

    def lost_tokens(self) -> None:
        """The tokens of the last failed attempt cannot continue, so it has added none."""
        self.failures, self.deaths = self.without_tokens

    def check(self, error: EngineError, *, max_attempts: int, longest_s: float) -> None:
        """Raise if there may be no further attempt; `error` ended the last."""
        if self.deaths >= _DEATHS:
            raise DeadlyPrompt(
                f"the engine died under this prompt on {_DEATHS} replicas and it is not tried again; the last: {error}"
            ) from error
        if self.faults >= _FAULTS:
            raise InvalidRequest(f"engines fail at this request and serve others, {_FAULTS} times: {error}") from error
        if self.failures >= max_attempts:
            raise _as_failure(error, f"after {self.failures} attempts (gateway.max_attempts)") from error
        if self.seconds >= longest_s:
            raise _as_failure(error, f"after {self.seconds:.0f} s (gateway.generate_timeout_s)") from error


def end_of(error: BaseException, *, cuts_off: bool) -> End:
    """How an attempt ended that raised `error`; `cuts_off` if an update is at fault."""
    match error:
        case DeadlineExceeded():
            return End.EXPIRED
        case asyncio.CancelledError() | GeneratorExit():
            return End.LEFT
    if cuts_off or isinstance(error, EngineOverwritten):
        return End.CUT_OFF
    is_refused = isinstance(error, EngineRefused)
    status = error.status if isinstance(error, EngineRefused) else 0
    if status == _BUSY or (isinstance(error, EngineError) and error.retry_after_s is not None):
        return End.BUSY
    return End.REFUSED if is_refused and status not in _REPLICAS_FAULT else End.FAILED


def _as_failure(error: EngineError, bound: str) -> EngineError:
    """The error for the client: an engine's 401 or 404 is not the client's, so it becomes a failure of the replica."""
    failure = error if not isinstance(error, EngineRefused) else EngineFailed("")
    failure.args = (f"{error} ({bound})",)
    failure.replica_id = error.replica_id
    return failure
