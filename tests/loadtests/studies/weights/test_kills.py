"""The study that kills replicas in the steps of updates: its schedule, its end, and a run on simulated engines."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtests.studies.weights.kills import Kill, is_whole, line, main, schedule

FLEET = """
gateway: {host: 127.0.0.1, port: 0}
engine: {kind: sim, num_replicas: 3, num_cpus: 0.1, stop_timeout_s: 1, sim: {load_s: 0.2}}
fleet: {discover_interval_s: 0.1, probe_interval_s: 0.1, lost_after_s: 1}
"""


def status(*replicas: tuple[int, str, int], version: int = 3, update: dict[str, Any] | None = None) -> dict[str, Any]:
    told = [{"pid": pid, "state": state, "weight_version": own} for pid, state, own in replicas]
    return {"weight_version": version, "weight_update": update, "replicas": told}


def test_each_step_is_met_in_its_middle() -> None:
    assert schedule({"pause": 0.2, "load": 0.4, "canary": 0.1}) == pytest.approx(
        {"pause": 0.1, "load": 0.4, "canary": 0.65}
    )


def test_a_fleet_is_whole_once_the_successor_serves_the_newest_version() -> None:
    serving, dead = (1, "SERVING", 3), (2, "SERVING", 3)
    assert not is_whole(status(serving, dead), 2, dead=2)
    assert not is_whole(status(serving), 2, dead=2)
    assert not is_whole(status(serving, (4, "SYNCING", 0)), 2, dead=2)
    assert not is_whole(status(serving, (4, "SERVING", 2)), 2, dead=2)
    assert not is_whole(status(serving, (4, "SERVING", 3), update={"version": 4}), 2, dead=2)
    assert is_whole(status(serving, (4, "SERVING", 3)), 2, dead=2)


def test_a_line_has_what_the_trainer_saw() -> None:
    kill = Kill(step="load", reached="load", saw="", push_s=1.0, whole_s=2.5, by_next_update=True)
    assert "trainer saw a version after 1.00 s, whole after 2.50 s, by the next update" in line(kill)


@pytest.mark.load
def test_a_replica_that_is_killed_in_an_update_serves_the_newest_version_again(tmp_path: Path) -> None:
    config, found = tmp_path / "fleet.yaml", tmp_path / "kills.json"
    config.write_text(FLEET)
    settings = [f"name={tmp_path.name}", f"weights.store={tmp_path}/store", f"engine.log_dir={tmp_path}"]
    words = ["-c", str(config), "--transport", "store", "--step", "load", "--limit-s", "120", "--json", str(found)]
    assert main([*words, *settings]) == 0
    (kill,) = orjson.loads(found.read_bytes())
    assert (kill["step"], kill["saw"]) == ("load", "")
    assert kill["whole_s"] > 0
