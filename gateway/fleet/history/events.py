"""The last events of the fleet, for people: changes of replicas and ends of updates."""

import json
import time
from collections import deque
from functools import partial
from pathlib import Path

import structlog

from engines.engine import Json
from gateway.fleet.history.file_writer import FileWriter

log = structlog.get_logger()

KEPT = 100
_FILE = "events.jsonl"
# The file is written again, shortened, when it has so many lines.
_LONGEST = 10 * KEPT


class Events:
    """The last hundred events, oldest first. Kept in a file, they outlive the gateway."""

    def __init__(self) -> None:
        self._events: deque[Json] = deque(maxlen=KEPT)
        self._file: Path | None = None
        self._lines = 0
        self._writer = FileWriter()

    def keep_in(self, folder: Path) -> None:
        """Take over the events of the gateway before this one, and keep all events in `folder` from now on."""
        own, self._file = list(self._events), folder / _FILE
        self._events.clear()
        self._events += [*_read(self._file), *own]
        self._rewrite()

    def add(self, subject: str, text: str) -> None:
        """Note an event; `subject` is a replica's id, or the name of what changed."""
        event = {"at": round(time.time(), 3), "subject": subject, "text": text}
        self._events.append(event)
        if self._lines >= _LONGEST:
            self._rewrite()
        else:
            self._write("a", [event])

    @property
    def last(self) -> list[Json]:
        return list(self._events)

    def _rewrite(self) -> None:
        self._lines = 0
        self._write("w", list(self._events))

    def flush(self, timeout_s: float) -> None:
        """Wait until all events are in the file, at most so long."""
        self._writer.flush(timeout_s)

    def _write(self, mode: str, events: list[Json]) -> None:
        self._lines += len(events)
        if self._file is not None:
            self._writer.add(partial(self._write_now, mode, events))

    def _write_now(self, mode: str, events: list[Json]) -> None:
        if self._file is None:
            return
        try:
            with self._file.open(mode, encoding="utf-8") as file:
                file.writelines(json.dumps(event) + "\n" for event in events)
        except OSError as error:
            log.warning("events are no longer kept", file=str(self._file), error=str(error))
            self._file = None


def _read(file: Path) -> list[Json]:
    """Read events; a line that a dying gateway cut short is skipped."""
    found: list[Json] = []
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines[-KEPT:]:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.keys() >= {"at", "subject", "text"}:
            found.append(event)
    return found
