"""The pause that a replica gets after answers that its engine did not give properly."""

import time

_FIRST_S, _LONGEST_S = 0.25, 30.0


class Backoff:
    """Grows with failures in a row; the first failure alone costs no pause, since its prompt may have caused it."""

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
            self._pause(_FIRST_S * 2.0 ** min(self._in_row - 2, 10))

    def busy(self, retry_after_s: float | None) -> None:
        """The engine has no room now. `retry_after_s` is its own word about when it will have; 0 says nothing."""
        self._in_row += 1
        self._pause(retry_after_s or _FIRST_S * 2.0 ** min(self._in_row - 1, 10))

    def succeeded(self) -> None:
        self._in_row, self.until = 0, 0.0

    def _pause(self, seconds: float) -> None:
        self.until = time.monotonic() + min(seconds, _LONGEST_S)
        Backoff._last_end = max(Backoff._last_end, self.until)
