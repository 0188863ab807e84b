"""What was measured, a line of JSON each, so that a run that was cut short goes on where it was."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from gateway.tune.bench import Measured
from gateway.tune.levers import Setting

Json = dict[str, Any]


class Journal:
    """The file, and what it says. `subject` is what was tuned: a journal of another subject is refused."""

    def __init__(self, file: Path, subject: Mapping[str, Any]) -> None:
        self._file = file
        self.entries: list[Json] = []
        self.spent_s = 0.0
        """Seconds of all sittings until the last entry."""
        told: Json = json.loads(json.dumps(subject))
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = list(_whole_lines(file))
        if whole and whole[0] != {"subject": told}:
            raise ConfigError(
                f"{file}: it was begun with another {_difference(whole[0].get('subject', {}), told)}; give another "
                "--out folder, or remove the file to begin anew"
            )
        # Cut to whole lines: a run that was killed may have left half of one.
        content = "".join(json.dumps(entry) + "\n" for entry in whole)
        file.write_text(content, encoding="utf-8")
        if whole:
            self.entries = whole[1:]
            self.spent_s = max((float(entry["at_s"]) for entry in self.entries), default=0.0)
        else:
            self._append({"subject": told})

    def add_measured(self, setting: Setting, measured: Measured, at_s: float) -> None:
        self._add({"setting": dict(setting.values), "measured": asdict(measured), "at_s": at_s})

    def add_pair(self, setting: Setting, start: float, best: float, at_s: float) -> None:
        """Speeds of the start and of `setting`, one run each."""
        self._add({"setting": dict(setting.values), "pair": [start, best], "at_s": at_s})

    def _add(self, entry: Json) -> None:
        self.entries.append(entry)
        self._append(entry)

    def _append(self, entry: Json) -> None:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _whole_lines(file: Path) -> Iterator[Json]:
    """The entries up to the first that is not whole."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _difference(before: Json, now: Json) -> str:
    return ", ".join(key for key in now if before.get(key) != now[key]) or "subject"
