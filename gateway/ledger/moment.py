"""A time that outlives the process: by the machine's uptime, and by the time of day for other boots."""

import time
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Moment:
    """Seconds since the epoch and since the boot `boot`. A clock that is set moves `wall` alone."""

    wall: float
    boot: str
    uptime: float

    @classmethod
    def now(cls) -> "Moment":
        return cls(time.time(), _boot(), time.clock_gettime(time.CLOCK_BOOTTIME))

    def seconds_until(self, later: "Moment") -> float:
        """Return at least 0. Between two boots it is as right as the time of day."""
        if self.boot and self.boot == later.boot:
            return later.uptime - self.uptime
        return max(0.0, later.wall - self.wall)


def _boot() -> str:
    """Return "" where the system has no id of its boot."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
