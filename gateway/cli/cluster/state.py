"""What commands keep of an application on this machine: the record that `up` leaves for `down`, of the Ray that it
started, and a lock, so that two commands never change it at once."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.errors import RolloutGatewayError
from engines.store.files import try_lock


class ApplicationBusy(RolloutGatewayError):
    """Another command changes the application."""


@dataclass(slots=True, kw_only=True)
class State:
    """One application's record, in a file. `ray_started_at` guards against a process id that was used again."""

    name: str
    dashboard: str
    ray_pid: int | None = None
    ray_started_at: int | None = None

    @staticmethod
    def folder(environ: Mapping[str, str] = os.environ) -> Path:
        base = environ.get("XDG_STATE_HOME")
        return (Path(base) if base else Path.home() / ".local" / "state") / "rollout-gateway"

    @classmethod
    def read(cls, name: str) -> "State | None":
        try:
            return cls(**json.loads((cls.folder() / f"{name}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self) -> None:
        self.folder().mkdir(parents=True, exist_ok=True)
        (self.folder() / f"{self.name}.json").write_text(json.dumps(asdict(self)))

    def remove(self) -> None:
        (self.folder() / f"{self.name}.json").unlink(missing_ok=True)

    @property
    def ray_lives(self) -> bool:
        return self.ray_pid is not None and process_started_at(self.ray_pid) == self.ray_started_at


@contextmanager
def changing(name: str, verb: str) -> Iterator[None]:
    """Hold the application's lock. Raises `ApplicationBusy` where another process holds it, and names that process."""
    path = State.folder() / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(descriptor):
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another command"
            raise ApplicationBusy(
                f"{holder} changes {name} already: wait for it, or end it and run `rollout-gateway down --name {name}`"
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"`rollout-gateway {verb}` (process {os.getpid()})\n".encode())
        yield
    finally:
        os.close(descriptor)


def process_started_at(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None for a process that has ended."""
    try:
        # The second field is the command in parentheses, which may itself hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
