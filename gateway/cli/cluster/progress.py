"""Progress of a command, for people: its step, the stage of every replica's start, and bounded waits."""

import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from engines.config import EngineConfig
from engines.errors import DeadlineExceeded
from engines.process.engine_log import doing, read_tail

_POLL_S = 0.5
_SILENCE_S = 10.0


class Report:
    """Prints a line for each step, note and change of a replica's stage, on stderr unless told otherwise."""

    def __init__(self, out: TextIO | None = None, silence_s: float = _SILENCE_S) -> None:
        self._out, self._silence_s = out or sys.stderr, silence_s
        self._began = self._stepped = self._spoke = time.monotonic()
        self._step = ""
        self._stages: dict[str, str] = {}

    def step(self, text: str) -> None:
        if text != self._step:
            self._step, self._stepped = text, time.monotonic()
            self.note(text)

    def note(self, text: str) -> None:
        self._spoke = time.monotonic()
        # Nobody may read any more (`up | head -1`), and a half-made fleet would be left.
        with suppress(OSError):
            print(f"[{self._spoke - self._began:5.1f} s] {text}", file=self._out, flush=True)

    def replicas(self, stages: Mapping[str, str]) -> None:
        """Note changes of the replicas' stages."""
        for name, stage in stages.items():
            if self._stages.get(name) != stage:
                self._stages[name] = stage
                self.note(f"{name}: {stage}")

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, awaited: str) -> None:
        """Wait, and repeat the step with its age after each `silence_s` without a line. Raises `DeadlineExceeded`
        naming `awaited` when the condition does not hold in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            now = time.monotonic()
            if now > deadline:
                raise DeadlineExceeded(f"waited {timeout_s:.0f} s for {awaited}")
            if self._step and now - self._spoke >= self._silence_s:
                self.note(f"still {self._step}, for {now - self._stepped:.0f} s now")
            time.sleep(_POLL_S)


def stages_of(application: Mapping[str, Any], groups: Mapping[str, EngineConfig]) -> dict[str, str]:
    """Return the stage of each engine replica by its name in log files, from Serve's details and the engines' logs.

    A replica answers no calls before it is up. Its log is read where `engine.log_dir` is on this machine; elsewhere
    Serve's state is all there is.
    """
    deployments = application.get("deployments", {})
    return {
        f"{group}-{replica['replica_id']}": _stage(f"{group}-{replica['replica_id']}", config.log_folder, replica)
        or f"STARTING{_awaits(replica, deployments[group])}"
        for group, config in groups.items()
        for replica in deployments.get(group, {}).get("replicas", ())
    }


def _stage(name: str, log_folder: Path, replica: Mapping[str, Any]) -> str:
    """Return "" for a replica that starts and has no log yet, or not here."""
    if replica["state"] != "STARTING":
        return "ready" if replica["state"] == "RUNNING" else str(replica["state"])
    logs = log_folder.glob(f"{name}-*.log")
    with suppress(ValueError, OSError):
        # A second try has a log of its own.
        found = doing(read_tail(max(logs, key=lambda log: log.stat().st_mtime)))
        return re.sub(r" \d+/\d+$", "", found)  # without a count, of which each number would be a line
    return ""


def _awaits(replica: Mapping[str, Any], deployment: Mapping[str, Any]) -> str:
    """Return what a replica without a node waits for: the GPUs and CPUs that Serve reserves for it."""
    options = deployment.get("deployment_config", {}).get("ray_actor_options", {})
    amounts = {"GPUs": options.get("num_gpus", 0), "CPUs": options.get("num_cpus", 0)}
    reserved = " and ".join(f"{amount:g} {unit}" for unit, amount in amounts.items() if amount)
    if replica.get("node_id") is not None or not reserved:
        return ""
    return f", waits for Ray to find {reserved} on one node and to start its worker"
