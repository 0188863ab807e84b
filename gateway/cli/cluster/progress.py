"""Progress of a deployment, for people: the current step, and the stage and age of every replica's start."""

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from engines.config import EngineConfig
from engines.process.engine_log import doing, read_tail

# Off a terminal a count that goes up is printed this often.
_COUNT_EVERY_S = 10.0
_SILENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Start:
    """One replica that starts. `name` is its group and Serve's tag, as in the names of its log files."""

    name: str
    doing: str
    elapsed_s: float


class Report(Protocol):
    """Receives each step, notes, and the starts of all replicas repeatedly."""

    def step(self, text: str) -> None: ...

    def note(self, text: str) -> None:
        """Print a line that stays."""

    def replicas(self, starts: Sequence[Start]) -> None: ...


def starts_of(application: Mapping[str, Any], groups: Mapping[str, EngineConfig]) -> list[Start]:
    """Return the stage of each engine replica, from Serve's details of the application and the engines' logs.

    A replica answers no calls before it is up. Its log is read where `engine.log_dir` is on this machine; elsewhere
    Serve's state is all there is.
    """
    deployments = application.get("deployments", {})
    return [
        Start(
            name=f"{name}-{replica['replica_id']}",
            doing=_doing(f"{name}-{replica['replica_id']}", group.log_folder, replica, _reserved(deployments[name])),
            elapsed_s=time.time() - replica["start_time_s"],
        )
        for name, group in groups.items()
        for replica in deployments.get(name, {}).get("replicas", ())
    ]


def _doing(name: str, log_folder: Path, replica: Mapping[str, Any], reserved: str) -> str:
    if replica["state"] == "RUNNING":
        return "ready"
    if replica["state"] != "STARTING":
        return str(replica["state"])
    logs = log_folder.glob(f"{name}-*.log")
    try:
        # A second try has a log of its own.
        return doing(read_tail(max(logs, key=lambda log: log.stat().st_mtime)))
    except (ValueError, OSError):
        pass  # no log yet, or not here
    if replica.get("node_id") is None and reserved:
        return f"STARTING, waits for Ray to find {reserved} on one node and to start its worker"
    return "STARTING"


def _reserved(deployment: Mapping[str, Any]) -> str:
    """Return the GPUs and CPUs that Serve reserves for a replica, in words."""
    options = deployment.get("deployment_config", {}).get("ray_actor_options", {})
    amounts = {"GPUs": options.get("num_gpus", 0), "CPUs": options.get("num_cpus", 0)}
    return " and ".join(f"{amount:g} {unit}" for unit, amount in amounts.items() if amount)


@contextmanager
def shown(console: Console, silence_s: float = _SILENCE_S) -> Iterator[Report]:
    """Open a report on `console`: a table that changes on a terminal, elsewhere a line per change.

    The current step is repeated, with its age, after each `silence_s` seconds without a line.
    """
    if console.is_terminal:
        table = _Table(console)
        with Live(get_renderable=table.draw, console=console, refresh_per_second=4, transient=True):
            yield table
        return
    lines, ended = _Lines(console), threading.Event()

    def remind() -> None:
        while not ended.wait(min(1.0, silence_s / 4)):
            lines.remind(silence_s)

    reminder = threading.Thread(target=remind, name="reminder", daemon=True)
    reminder.start()
    try:
        yield lines
    finally:
        ended.set()
        reminder.join()


class _Lines:
    """Prints a line per change. The reminder has a thread of its own, since waits block."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = self._stepped = self._spoke = time.monotonic()
        self._step = ""
        self._printed: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def step(self, text: str) -> None:
        if text != self._step:
            self._step, self._stepped = text, time.monotonic()
            self._print(text)

    def note(self, text: str) -> None:
        self._print(text)

    def replicas(self, starts: Sequence[Start]) -> None:
        for start in starts:
            before, printed_at = self._printed.get(start.name, ("", 0.0))
            now = time.monotonic()
            counts_on = _without_count(before) == _without_count(start.doing)
            if start.doing == before or (counts_on and now - printed_at < _COUNT_EVERY_S):
                continue
            self._printed[start.name] = (start.doing, now)
            self._print(f"{start.name}: {start.doing}")

    def remind(self, silence_s: float) -> None:
        """Repeat the step when nothing was printed for `silence_s`."""
        now = time.monotonic()
        if self._step and now - self._spoke >= silence_s:
            self._print(f"still {self._step}, for {now - self._stepped:.0f} s now")

    def _print(self, text: str) -> None:
        with self._lock:
            self._spoke = time.monotonic()
            line = f"[{self._spoke - self._began:5.1f} s] {text}"
            # Rich ends the process where nobody reads any more (`up | head -1`); a half-made fleet would be left.
            with suppress(SystemExit):
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Table:
    """Redrawn in place: the step with its age, and below it a row per replica."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._step, self._stepped = "", time.monotonic()
        self._starts: Sequence[Start] = ()

    def step(self, text: str) -> None:
        if text != self._step:
            self._step, self._stepped = text, time.monotonic()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def replicas(self, starts: Sequence[Start]) -> None:
        self._starts = starts

    def draw(self) -> Group:
        title = f"{self._step} ({time.monotonic() - self._stepped:.0f} s)" if self._step else ""
        table = Table(box=None, pad_edge=False, show_header=False)
        for start in self._starts:
            table.add_row(start.name, start.doing, f"{start.elapsed_s:.0f} s")
        return Group(Text(title, style="italic"), table)  # a table without columns would not draw its title


def _without_count(text: str) -> str:
    return re.sub(r" \d+/\d+$", "", text)
