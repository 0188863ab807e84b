"""The simulated engine's profiler: Python's own, on the thread that schedules."""

import cProfile
import time
from pathlib import Path

from engines.errors import InvalidRequest


class Profiler:
    """Writes a file for `pstats` at each stop."""

    def __init__(self) -> None:
        self._profile: cProfile.Profile | None = None
        self._folder = Path()

    @property
    def is_recording(self) -> bool:
        return self._profile is not None

    def start(self, folder: Path) -> None:
        """Record from now on. Raise `InvalidRequest` while a record runs."""
        if self._profile is not None:
            raise InvalidRequest("the profiler runs already: /stop_profile ends it")
        self._folder, self._profile = folder, cProfile.Profile()
        self._profile.enable()

    def stop(self) -> None:
        """Write what is recorded. Raise `InvalidRequest` without a record."""
        if self._profile is None:
            raise InvalidRequest("the profiler does not run: /start_profile starts it")
        profile, self._profile = self._profile, None
        profile.disable()
        profile.dump_stats(self._folder / f"sim-{time.time_ns()}.pstats")
