"""What `status` prints of a fleet."""

import contextlib
import io

from engines.engine import Json
from gateway.cli.output import print_fleet


def fleet() -> Json:
    replica = {
        "label": "engine-0", "state": "SERVING", "weight_version": 3, "samples_in_flight": 2, "restarts": 0,
        "uptime_s": None, "reason": "joined", "gpu_ids": ["0", "1"], "pid": 0, "model": "m", "replica_id": "engine-xyz",
        "url": "http://127.0.0.1:1", "frozen": False, "start": None,
    }  # fmt: skip
    empty: Json = {name: [] for name in ("adapters", "replicas_missing")}
    return empty | {
        "policy": "m", "weight_version": 3, "weight_store": {"reason": ""}, "weight_update": None,
        "last_weight_update": None, "replicas_refused": {}, "replicas": [replica], "events": [],
    }  # fmt: skip


def printed(report: Json, out: io.StringIO) -> list[str]:
    with contextlib.redirect_stdout(out):
        print_fleet(report)
    return out.getvalue().splitlines()


def test_a_replica_is_a_row() -> None:
    head, row = printed(fleet(), io.StringIO())[-2:]
    assert head.split()[:4] == ["replica", "state", "version", "samples"]
    assert row.split() == ["engine-0", "SERVING", "3", "2", "0", "-", "0,1", "m", "joined"]


def test_replicas_that_miss_for_one_reason_are_one_line() -> None:
    waits = {"group": "engine", "reason": "has not joined yet"}
    lines = printed(fleet() | {"replicas_missing": [waits, {**waits, "reason": "starts"}, waits]}, io.StringIO())
    assert [line.split(None, 1)[1] for line in lines if line.startswith("missing:")] == [
        "engine x 2: has not joined yet",
        "engine x 1: starts",
    ]
