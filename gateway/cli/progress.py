"""How a deployment comes up, for the eyes of whoever waits: what every replica is doing, and for how long."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from engines.config import EngineConfig
from engines.process.engine_log import doing, read_tail

# Where lines cannot be taken back, a count that goes up is told this often.
_COUNT_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Start:
    """One replica on its way up. `name` is its group and Serve's tag, as in the names of its log files."""

    name: str
    doing: str
    elapsed_s: float


class Report(Protocol):
    """Is told of each step, and again and again of all replicas."""

    def step(self, text: str) -> None: ...

    def replicas(self, starts: Sequence[Start]) -> None: ...


def starts_of(application: Mapping[str, Any], groups: Mapping[str, EngineConfig]) -> list[Start]:
    """What each engine replica of an application does now, by Serve's details of it and the engines' logs.

    A replica cannot be asked before it is up. Its log is read where `engine.log_dir` is on this machine; elsewhere
    Serve's word is all there is.
    """
    deployments = application.get("deployments", {})
    return [
        Start(
            name=f"{name}-{replica['replica_id']}",
            doing=_doing(f"{name}-{replica['replica_id']}", group.log_dir, replica, _gpus(deployments[name])),
            elapsed_s=time.time() - replica["start_time_s"],
        )
        for name, group in groups.items()
        for replica in deployments.get(name, {}).get("replicas", ())
    ]


def _doing(name: str, log_dir: str, replica: Mapping[str, Any], gpus: float) -> str:
    if replica["state"] == "RUNNING":
        return "ready"
    if replica["state"] != "STARTING":
        return str(replica["state"])
    logs = Path(log_dir).glob(f"{name}-*.log")
    try:
        # A second try has a log of its own.
        return doing(read_tail(max(logs, key=lambda log: log.stat().st_mtime)))
    except (ValueError, OSError):
        pass  # no log yet, or not here
    if replica.get("node_id") is None and gpus:
        return f"STARTING, waits for {gpus:g} GPUs on one node"
    return "STARTING"


def _gpus(deployment: Mapping[str, Any]) -> float:
    """What Serve reserves for a replica of it."""
    options = deployment.get("deployment_config", {}).get("ray_actor_options", {})
    return float(options.get("num_gpus", 0))


@contextmanager
def shown(console: Console) -> Iterator[Report]:
    """A report on `console`: a table that changes on a terminal, a line per change elsewhere."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield _Table(live)


class _Lines:
    """A line per change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._step = ""
        self._told: dict[str, tuple[str, float]] = {}

    def step(self, text: str) -> None:
        if text != self._step:
            self._step = text
            self._print(text)

    def replicas(self, starts: Sequence[Start]) -> None:
        for start in starts:
            before, told_at = self._told.get(start.name, ("", 0.0))
            now = time.monotonic()
            counts_on = _without_count(before) == _without_count(start.doing)
            if start.doing == before or (counts_on and now - told_at < _COUNT_EVERY_S):
                continue
            self._told[start.name] = (start.doing, now)
            self._print(f"{start.name}: {start.doing}")

    def _print(self, text: str) -> None:
        line = f"[{time.monotonic() - self._began:5.1f} s] {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Table:
    """Redrawn in place: the step, and below it a row per replica."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._step = ""
        self._starts: Sequence[Start] = ()

    def step(self, text: str) -> None:
        self._step = text
        self._draw()

    def replicas(self, starts: Sequence[Start]) -> None:
        self._starts = starts
        self._draw()

    def _draw(self) -> None:
        table = Table(box=None, pad_edge=False, show_header=False, title=self._step, title_justify="left")
        for start in self._starts:
            table.add_row(start.name, start.doing, f"{start.elapsed_s:.0f} s")
        self._live.update(table)


def _without_count(text: str) -> str:
    return re.sub(r" \d+/\d+$", "", text)
