"""The journal of measurements, a line of JSON each, from which an interrupted run resumes."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.config import EngineConfig
from engines.errors import ConfigError
from tuning.tune.bench import Measured
from tuning.tune.levers import Setting

Json = dict[str, Any]

# Settings that do not affect the speed of one replica.
NOT_THE_SUBJECT = {"log_dir", "num_replicas"}


class Journal:
    """The file and its entries. `subject` has engine, levers and workload: a journal of another subject is refused."""

    def __init__(self, file: Path, subject: Mapping[str, Any]) -> None:
        self._file = file
        self.entries: list[Json] = []
        self.spent_s = 0.0
        """Seconds of all sittings until the last entry."""
        plain: Json = json.loads(json.dumps(subject))
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = list(_whole_lines(file))
        if whole and whole[0] != {"subject": plain}:
            raise ConfigError(
                f"{file}: it was begun with another {_difference(whole[0].get('subject', {}), plain)}; give another "
                "--out folder, or remove the file to start over"
            )
        # Cut to whole lines: a killed run may have left half a line.
        content = "".join(json.dumps(entry) + "\n" for entry in whole)
        file.write_text(content, encoding="utf-8")
        if whole:
            self.entries = whole[1:]
            self.spent_s = max((float(entry["at_s"]) for entry in self.entries), default=0.0)
        else:
            self._append({"subject": plain})

    def add_measured(self, setting: Setting, measured: Measured, at_s: float) -> None:
        self._add({"setting": dict(setting.values), "measured": asdict(measured), "at_s": at_s})

    def add_round(
        self, fastest: Setting, engines: Mapping[str, EngineConfig], speeds: Mapping[str, float], at_s: float
    ) -> None:
        """Add the speeds of a final run by role; `fastest` is the result of the search."""
        entry = {"setting": dict(fastest.values), "round": dict(speeds), "engines": _digest(engines)}
        self._add({**entry, "at_s": at_s})

    def rounds(self, fastest: Setting, engines: Mapping[str, EngineConfig]) -> list[dict[str, float]]:
        """Return the final runs of exactly these engines."""
        known = (entry for entry in self.entries if "round" in entry and entry["setting"] == dict(fastest.values))
        return [dict(entry["round"]) for entry in known if entry["engines"] == _digest(engines)]

    def _add(self, entry: Json) -> None:
        self.entries.append(entry)
        self._append(entry)

    def _append(self, entry: Json) -> None:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _digest(engines: Mapping[str, EngineConfig]) -> str:
    """Return a digest of the settings that affect a measurement; folders of logs do not."""
    dumped = {role: engine.model_dump(mode="json", exclude=NOT_THE_SUBJECT) for role, engine in engines.items()}
    return hashlib.sha256(json.dumps(dumped, sort_keys=True).encode()).hexdigest()[:16]


def _whole_lines(file: Path) -> Iterator[Json]:
    """Yield the entries up to the first that is not whole."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _difference(before: Json, now: Json) -> str:
    return ", ".join(key for key in now if before.get(key) != now[key]) or "subject"
