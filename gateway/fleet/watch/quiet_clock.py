"""The clock of a replica's silence: seconds under load without a sign of tokens."""

import time


class QuietClock:
    """Runs while the replica has load, and keeps its time without: clients that give up between do not set it back."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._runs_since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before_s if self._runs_since is None else self._before_s + time.monotonic() - self._runs_since

    def run(self) -> None:
        if self._runs_since is None:
            self._runs_since = time.monotonic()

    def stop(self) -> None:
        self._before_s, self._runs_since = self.seconds, None

    def restart(self) -> None:
        """Begin at 0, running or not."""
        self._before_s = 0.0
        if self._runs_since is not None:
            self._runs_since = time.monotonic()
