"""The places of engines in their groups: a successor takes the place, and so the label, of an engine that was lost."""

from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path

import structlog
from pydantic import BaseModel, ValidationError

from engines.types import ReplicaInfo
from gateway.fleet.history.file_writer import FileWriter

log = structlog.get_logger()

_FILE = "places.json"


class Place(BaseModel):
    """One engine's place. `restarts` counts the engines that were started again here after a loss."""

    replica_id: str = ""
    incarnation: str = ""
    restarts: int = 0


class _Record(BaseModel):
    configuration: str = ""
    groups: dict[str, list[Place]] = {}


class Places:
    """The places by group; a label counts them from 0. Kept in a file, they outlive the gateway."""

    def __init__(self) -> None:
        self._record = _Record()
        self._file: Path | None = None
        self._writer = FileWriter()

    def keep_in(self, folder: Path, configuration: str) -> None:
        """Take over the places of a gateway with the same `configuration`, and keep them in `folder` from now on.

        Under another configuration Serve has replaced all engines on purpose, which is no restart of any.
        """
        self._file = folder / _FILE
        self._record = _Record(configuration=configuration)
        try:
            found = _Record.model_validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValidationError) as error:
            log.warning("restarts count from 0: their file cannot be read", file=str(self._file), error=str(error))
            return
        if found.configuration == configuration:
            self._record = found

    def take(self, info: ReplicaInfo, present: AbstractSet[str]) -> tuple[int, int]:
        """Return the number of the engine's place, and the restarts there. Ids that are `present` keep theirs."""
        places = self._record.groups.setdefault(info.group, [])
        own = (number for number, place in enumerate(places) if place.replica_id == info.replica_id)
        free = (number for number, place in enumerate(places) if place.replica_id not in present)
        number = next(own, next(free, len(places)))
        places[number:] = places[number:] or [Place()]
        place = places[number]
        place.restarts += place.incarnation not in ("", info.incarnation)
        place.replica_id, place.incarnation = info.replica_id, info.incarnation
        self._write()
        return number, place.restarts

    def leave(self, group: str, number: int) -> None:
        """Free the place of an engine that was removed on purpose: the next one there is no restart of it."""
        self._record.groups[group][number] = Place()
        self._write()

    def flush(self, timeout_s: float) -> None:
        """Wait until the file is written, at most so long."""
        self._writer.flush(timeout_s)

    def _write(self) -> None:
        if self._file is not None:
            self._writer.add(partial(self._write_now, self._record.model_dump_json()))

    def _write_now(self, record: str) -> None:
        if self._file is None:
            return
        new = self._file.with_suffix(".new")
        try:
            new.write_text(record, encoding="utf-8")
            new.replace(self._file)
        except OSError as error:
            log.warning("restarts are no longer kept over the gateway's own", file=str(self._file), error=str(error))
            self._file = None
