"""Which clients were seen running against the gateway: a JSON file each, written by bench clients and by tests.

The files under docs/results/clients/ make the table in docs/compatibility.md: `python -m scripts.docs`.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRun:
    """A client of others, what it was run against, and what it did."""

    client: str
    version: str
    against: str
    ran: str


def write_record(folder: Path, run: ClientRun, check: str, outcome: str, facts: Sequence[str]) -> None:
    """Add one check to the client's file. What was written of another version of the client is left behind."""
    path = folder / f"{re.sub('[^a-z0-9]+', '-', run.client.lower()).strip('-')}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if before.get("version") != run.version:
        before = {"checks": {}, "facts": []}
    record = {
        **asdict(run),
        "date": time.strftime("%Y-%m-%d"),
        "checks": before["checks"] | {check: outcome},
        "facts": list(dict.fromkeys([*(fact for fact in before["facts"] if not _told_anew(fact, facts)), *facts])),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _told_anew(fact: str, facts: Sequence[str]) -> bool:
    """Whether one of `facts` is the same up to its first figure."""
    return any(re.split(r"\d", fact)[0] == re.split(r"\d", one)[0] for one in facts)
