"""The record of one weight update: its phase, the seconds of its steps, its outcome on each replica. The log of updates
keeps those that have ended."""

import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from hashlib import blake2s
from itertools import islice
from math import prod
from pathlib import Path

import structlog

from engines.engine import Json
from engines.types import InFlight
from engines.weight_label import committed_label
from gateway.fleet.history import Events
from gateway.fleet.metrics import Metrics

log = structlog.get_logger()

KEPT = 100


class Phase(StrEnum):
    """The phases of an update; `update.py` has their order."""

    OPEN = "OPEN"  # announced, and no engine touched yet; with `drain` the gate is closed
    RECEIVING = "RECEIVING"  # tensors move; in a flat group engines hold a mixture
    VERIFYING = "VERIFYING"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"


@dataclass(slots=True)
class UpdateRecord:
    """An update in progress, and its record afterwards.

    `seconds` are by step (drain, store, prepare, receipt, pause, begin, transfer, digests, load, canary, keep,
    label); the rest of `age_s` is the trainer's time between its calls.
    `frozen_at` is set while it holds engines frozen, and `stopped_s` is for how long it did. `replicas` has its
    outcome by replica id. `draft` is the folder that its tensors are written to for the weight store. `unstaged` says
    why engines do not receive it beside their weights. With `keeps_kv` requests in flight go on over KV of the version
    before.
    """

    version: int
    transport: str
    in_flight: InFlight
    phase: Phase = Phase.OPEN
    opened_at: float = field(default_factory=time.monotonic)
    opened: datetime = field(default_factory=lambda: datetime.now(UTC))
    names: set[str] = field(default_factory=set)
    num_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    replicas: dict[str, Json] = field(default_factory=dict)
    draft: Path | None = None
    unstaged: str = "it is not received in a group with the trainer"
    keeps_kv: bool = field(init=False)
    frozen_at: float | None = None
    stopped_s: float = 0.0
    error: str = ""
    ended_at: float | None = None

    def __post_init__(self) -> None:
        self.keeps_kv = self.in_flight is InFlight.KEEP

    @property
    def label(self) -> str:
        """The label of its version, unique across restarts."""
        name = f"{self.version} of {self.opened.isoformat()}"
        return committed_label(self.version, blake2s(name.encode(), digest_size=4).hexdigest())

    @property
    def staged(self) -> bool:
        return not self.unstaged

    @property
    def age_s(self) -> float:
        """Seconds from its start to its end; to now while it runs."""
        return (self.ended_at or time.monotonic()) - self.opened_at

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Adds the block's seconds to a step."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - began

    def go_on(self) -> None:
        """Notes that its engines generate again."""
        if self.frozen_at is not None:
            self.stopped_s, self.frozen_at = time.monotonic() - self.frozen_at, None

    def receive(self, update_info: Json) -> None:
        """Counts tensors that every replica has received."""
        self.names.update(update_info["names"])
        self.num_bytes += num_bytes(update_info)

    def end(self, phase: Phase, error: str = "") -> None:
        self.phase, self.error, self.ended_at = phase, error, time.monotonic()

    def report(self) -> Json:
        """As JSON: seconds, bytes and counts; `end` is null while it runs."""
        return {
            "version": self.version,
            "phase": self.phase.value,
            "end": self.phase.value.lower() if self.ended_at is not None else None,
            "transport": self.transport,
            "staged": self.staged,
            "unstaged": self.unstaged or None,
            "in_flight": self.in_flight.value,
            "started": self.opened.isoformat(timespec="milliseconds"),
            "age_s": round(self.age_s, 4),
            "stopped_s": round(self.stopped_s, 4),
            "seconds": {step: round(seconds, 4) for step, seconds in self.seconds.items()},
            "tensors": len(self.names),
            "bytes": self.num_bytes,
            "replicas": self.replicas,
            "error": self.error or None,
        }


class UpdateLog:
    """Records of the last updates, each of which is one event."""

    def __init__(self, metrics: Metrics, events: Events) -> None:
        self._metrics = metrics
        self._events = events
        self._updates: deque[UpdateRecord] = deque(maxlen=KEPT)

    def reports(self, most: int = KEPT) -> list[Json]:
        """The newest first."""
        return [update.report() for update in islice(self._updates, most)]

    def add(self, update: UpdateRecord) -> None:
        """Adds an update that has just ended."""
        self._updates.appendleft(update)
        report = update.report()
        text = f"{report['end']} over {update.transport} in {update.age_s:.2f} s"
        text += f": {update.error}" if update.error else ""
        self._events.add(f"version {update.version}", text, is_routine=not update.error)
        self._metrics.weight_updates.labels(report["end"]).inc()
        for step, seconds in (*update.seconds.items(), ("whole", update.age_s)):
            self._metrics.weight_update_seconds.labels(step).observe(seconds)
        write = log.info if not update.error else log.error
        del report["phase"], report["started"]
        write("weight update", **report)


def num_bytes(update_info: Json) -> int:
    """Bytes of the announced tensors; 0 without their dtypes."""
    dtypes, shapes = update_info.get("dtype_names") or [], update_info.get("shapes") or []
    return sum(itemsize(dtype) * prod(shape) for dtype, shape in zip(dtypes, shapes, strict=False))


@cache
def itemsize(dtype: str) -> int:
    """Bytes of an element of torch's `dtype`; a name without a number, such as bool, is one byte."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1
