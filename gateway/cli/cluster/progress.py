"""Progress of a command, for people: its step, the phase of every replica's start, and bounded waits."""

import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from engines.errors import DeadlineExceeded

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


def stages_of(application: Mapping[str, Any], groups: Iterable[str], status: Mapping[str, Any]) -> dict[str, str]:
    """Return the stage of each engine replica by its id: the phase of its start by the gateway's status, else Serve's
    state of it."""
    starts = {row["replica_id"]: row["start"] for row in status.get("replicas_missing", ())}
    found = {}
    for group in groups:
        deployment = application.get("deployments", {}).get(group, {})
        for replica in deployment.get("replicas", ()):
            replica_id, state = f"{group}-{replica['replica_id']}", replica["state"]
            if state == "STARTING":
                start = starts.get(replica_id)
                state = _phase(start) if start else f"STARTING{_awaits(replica, deployment)}"
            found[replica_id] = "ready" if state == "RUNNING" else state
    return found


def _phase(start: Mapping[str, Any]) -> str:
    """Return the phase of a start without a count, of which each number would be a line."""
    return re.sub(r" \d+/\d+$", "", list(start["phases"])[-1])


def _awaits(replica: Mapping[str, Any], deployment: Mapping[str, Any]) -> str:
    """Return what a replica without a node waits for: the GPUs and CPUs that Serve reserves for it."""
    options = deployment.get("deployment_config", {}).get("ray_actor_options", {})
    amounts = {"GPUs": options.get("num_gpus", 0), "CPUs": options.get("num_cpus", 0)}
    reserved = " and ".join(f"{amount:g} {unit}" for unit, amount in amounts.items() if amount)
    if replica.get("node_id") is not None or not reserved:
        return ""
    return f", waits for Ray to find {reserved} on one node and to start its worker"
