"""What is known of an engine's life: its answers, its tokens, and since when it is suspected."""

import time

from engines.errors import DeadlineExceeded, EngineError, EngineGone
from engines.types import ReplicaState

Failure = EngineError | DeadlineExceeded
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0


class Evidence:
    """The signs of one replica's life.

    `failure` is that of the last probe, None where it went well. `answered_at` is the monotonic time of the last good
    probe or token. `is_listed` is True while Serve lists the replica, `is_stalled` while tokens stand still.
    `suspect_since` is set while the replica is SUSPECT, and `before` has its state and reason until then.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.answered_at = time.monotonic()
        self.is_listed = True
        self.is_stalled = False
        self.suspect_since: float | None = None
        self.before = ReplicaState.STARTING, ""
        self.longest_given_up = 0
        self._quiet_before_s = 0.0
        self._loaded_since: float | None = None

    @property
    def is_gone(self) -> bool:
        """True where the last probe found nothing on the engine's port."""
        return isinstance(self.failure, EngineGone)

    @property
    def is_silent(self) -> bool:
        """True where the last probe had no answer in time."""
        return isinstance(self.failure, DeadlineExceeded)

    @property
    def quiet_s(self) -> float:
        """Seconds under load since the last sign that tokens are made; clients that give up do not set it back."""
        running_s = 0.0 if self._loaded_since is None else time.monotonic() - self._loaded_since
        return self._quiet_before_s + running_s

    def answered(self) -> None:
        self.answered_at, self.failure = time.monotonic(), None

    def saw_progress(self) -> None:
        """Note a chunk, a reply, or another sign that tokens are made."""
        self.answered_at = time.monotonic()
        self.excuse()

    def excuse(self) -> None:
        """Begin the time of a standstill again: tokens are made, or the engine is held."""
        self._quiet_before_s, self.longest_given_up = 0.0, 0
        if self._loaded_since is not None:
            self._loaded_since = time.monotonic()

    def has_load(self) -> None:
        if self._loaded_since is None:
            self._loaded_since = time.monotonic()

    def has_no_load(self) -> None:
        self._quiet_before_s, self._loaded_since = self.quiet_s, None

    def entered(self, state: ReplicaState, before: tuple[ReplicaState, str]) -> None:
        """Note a change of the replica's state."""
        if state is ReplicaState.SUSPECT:
            self.before, self.suspect_since = before, time.monotonic()
        else:
            self.suspect_since = None


class Backoff:
    """The pause that a replica gets after answers that its engine did not give properly.

    It grows with failures in a row; the first failure alone costs no pause, since its prompt may have caused it."""

    _last_end = 0.0
    """Monotonic end of the longest pause of any replica of this process."""

    def __init__(self) -> None:
        self._in_row = 0
        self.until = 0.0
        """Monotonic end of the pause; 0 without a pause since the last success, as most replicas have it: a placement
        looks no further at them."""

    @classmethod
    def is_any_on(cls) -> bool:
        """False where no replica of this process pauses, as mostly: a placement need not look at each."""
        return time.monotonic() < cls._last_end

    @property
    def left_s(self) -> float:
        """Seconds until the replica takes rollouts again; 0 if it does now."""
        return max(0.0, self.until - time.monotonic())

    def failed(self) -> None:
        self._in_row += 1
        if self._in_row > 1:
            self._pause(_FIRST_PAUSE_S * 2.0 ** min(self._in_row - 2, 10))

    def busy(self, retry_after_s: float | None) -> None:
        """The engine has no room now. `retry_after_s` is its own word about when it will have; 0 says nothing."""
        self._in_row += 1
        self._pause(retry_after_s or _FIRST_PAUSE_S * 2.0 ** min(self._in_row - 1, 10))

    def succeeded(self) -> None:
        self._in_row, self.until = 0, 0.0

    def _pause(self, seconds: float) -> None:
        self.until = time.monotonic() + min(seconds, _LONGEST_PAUSE_S)
        Backoff._last_end = max(Backoff._last_end, self.until)
