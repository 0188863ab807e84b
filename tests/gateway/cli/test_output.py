"""What `status` prints of a fleet."""

import contextlib
import io
import time

import pytest

from engines.engine import Json
from gateway.cli.output import print_fleet


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def fleet(*events: Json) -> Json:
    replica = {
        "label": "engine-0", "state": "SERVING", "weight_version": 3, "samples_in_flight": 2, "restarts": 0,
        "uptime_s": None, "reason": "joined", "gpu_ids": ["0", "1"], "pid": 0, "model": "m", "replica_id": "engine-xyz",
        "url": "http://127.0.0.1:1", "frozen": False, "start": None,
    }  # fmt: skip
    empty: Json = {name: [] for name in ("adapters", "replicas_missing")}
    return empty | {
        "policy": "m", "weight_version": 3, "weight_store": {"reason": ""}, "weight_update": None,
        "last_weight_update": None, "replicas_refused": {}, "replicas": [replica], "events": list(events),
    }  # fmt: skip


def printed(report: Json, out: io.StringIO) -> list[str]:
    with contextlib.redirect_stdout(out):
        print_fleet(report)
    return out.getvalue().splitlines()


def test_a_terminal_has_the_columns_that_fit_and_a_file_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    head, row = printed(fleet(), Terminal())[-2:]
    assert head.split() == ["replica", "state", "version", "samples", "restarts"]
    assert row.split() == ["engine-0", "SERVING", "3", "2", "0"]
    head, row = printed(fleet(), io.StringIO())[-2:]
    assert head.split()[-1] == "url"
    assert row.split()[-6:] == ["joined", "0,1", "-", "m", "engine-xyz", "http://127.0.0.1:1"]


def test_replicas_that_miss_for_one_reason_are_one_line() -> None:
    waits = {"group": "engine", "reason": "has not joined yet"}
    lines = printed(fleet() | {"replicas_missing": [waits, {**waits, "reason": "starts"}, waits]}, io.StringIO())
    assert [line.split(None, 1)[1] for line in lines if line.startswith("missing:")] == [
        "engine x 2: has not joined yet",
        "engine x 1: starts",
    ]


def test_a_death_of_the_last_hour_is_shown_before_the_last_ten_events() -> None:
    now = time.time()
    old = {"at": now - 7200, "subject": "engine-a", "text": "SUSPECT -> LOST: gone"}
    recent = {"at": now - 1800, "subject": "engine-b", "text": "SUSPECT -> LOST: gone"}
    others = [{"at": now, "subject": f"engine-{number}", "text": "SYNCING -> SERVING"} for number in range(12)]
    lines = printed(fleet(old, recent, *others), io.StringIO())[-11:]
    assert "engine-b: SUSPECT -> LOST: gone" in lines[0]
    assert "engine-2: " in lines[1]
