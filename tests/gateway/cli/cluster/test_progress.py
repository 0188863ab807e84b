"""The output of a wait for a deployment."""

import io
import subprocess
import sys
from typing import Any

import pytest

from engines.errors import DeadlineExceeded
from gateway.cli.cluster import progress
from gateway.cli.cluster.progress import Report, stages_of


def application(**replicas: str) -> dict[str, Any]:
    """As Serve's API tells it, for one group named engine."""
    found = [{"replica_id": tag, "state": state, "node_id": "n"} for tag, state in replicas.items()]
    return {"deployments": {"engine": {"replicas": found}, "gateway": {"replicas": []}}}


def test_work_goes_on_where_nobody_reads_its_output() -> None:
    code = """
import os, sys
from engines.errors import DeadlineExceeded
from gateway.cli.cluster import progress
from gateway.cli.cluster.progress import Report
reader, writer = os.pipe()
os.close(reader)
report = Report(os.fdopen(writer, "w", buffering=1))
report.step("starting Ray")
report.note("undoing")
os._exit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 7


def test_a_replica_that_starts_is_in_the_phase_that_the_gateway_was_told() -> None:
    found = application(a1="STARTING", b2="RUNNING", c3="STARTING", d4="STOPPING")
    starts = {"engine-a1": {"phases": {"importing": 8.0, "loading weights 3/8": 0.2}}, None: None}
    status = {"replicas_missing": [{"replica_id": name, "start": start} for name, start in starts.items()]}
    assert stages_of(found, ["engine"], status) == {
        "engine-a1": "loading weights",
        "engine-b2": "ready",
        "engine-c3": "STARTING",
        "engine-d4": "STOPPING",
    }


@pytest.mark.parametrize(
    ("reserved", "said"),
    [
        ({"num_gpus": 2.0, "num_cpus": 0.0}, ", waits for Ray to find 2 GPUs on one node and to start its worker"),
        (
            {"num_gpus": 0.5, "num_cpus": 64.0},
            ", waits for Ray to find 0.5 GPUs and 64 CPUs on one node and to start its worker",
        ),
        ({"num_cpus": 0.0}, ""),
    ],
)
def test_a_replica_without_a_node_waits_for_what_it_reserves(reserved: dict[str, float], said: str) -> None:
    waiting = application(a1="STARTING")
    waiting["deployments"]["engine"]["replicas"][0]["node_id"] = None
    waiting["deployments"]["engine"]["deployment_config"] = {"ray_actor_options": reserved}
    assert stages_of(waiting, ["engine"], {}) == {"engine-a1": "STARTING" + said}


def test_a_step_that_takes_long_is_repeated_with_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_POLL_S", 0.001)
    out = io.StringIO()
    report = Report(out, silence_s=0.01)
    report.step("starting Ray")
    report.wait_until(lambda: "still starting Ray, for 0 s now" in out.getvalue(), 20, "a reminder")
    with pytest.raises(DeadlineExceeded, match="waited 0 s for Ray to start"):
        report.wait_until(lambda: False, 0.0, "Ray to start")
