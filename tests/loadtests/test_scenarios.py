"""Every scenario, short, against a gateway over simulated engines."""

import csv
from pathlib import Path

import pytest

from engines.process.port import free_port
from tests.loadtests.locust_runs import locust
from tests.rigs.rig import Rig, StartRig

pytestmark = pytest.mark.load


@pytest.fixture
async def rig(start_rig: StartRig, tmp_path: Path) -> Rig:
    return await start_rig(2, sim={"decode_step_s": 0.005}, weights={"store": str(tmp_path / "store")})


async def test_trainers_with_weight_updates(rig: Rig, tmp_path: Path) -> None:
    ended = await locust(
        "trainer", rig.url, tmp_path, "-u", "2", "-r", "2", "-t", "4s", "--prompts", "3", "--samples", "2",
        "--update-every", "1", "--csv", str(tmp_path / "load"), "--html", str(tmp_path / "load.html"),
    )  # fmt: skip
    assert ended.code == 0, ended.said
    told = ended.figures
    assert told["failures"] == 0
    assert told["completions"] == 6 * told["makespan_s.count"]
    assert told["tokens.sum"] == 6 * told["completions"]
    assert told["update_s.count"] >= 1
    assert told["tail_ratio.min"] >= 1
    # Simulated engines stream every 4 tokens, 5 ms each: a reader of whole blocks would see all six at once.
    assert told["tpot_s.max"] > 0.004
    assert (told["ttft_s.count"], told["completion_s.count"]) == (told["completions"], told["completions"])
    assert told["ttft_s.sum"] < told["completion_s.sum"]
    with (tmp_path / "load_stats.csv").open() as stats:
        rows = {row["Name"]: row for row in csv.DictReader(stats)}
    assert int(rows["makespan"]["Request Count"]) == told["makespan_s.count"]
    assert rows["Aggregated"]["Request Count"] == rows["/v1/completions"]["Request Count"]
    assert (tmp_path / "load.html").stat().st_size > 0


async def test_a_batch_asked_for_prompt_by_prompt_may_mix_lengths(rig: Rig, tmp_path: Path) -> None:
    options = ["-t", "2s", "--prompts", "4", "--samples", "2", "--max-tokens", "4*3,40*1"]
    ended = await locust("trainer", rig.url, tmp_path, *options, "--ask", "prompt")
    assert ended.code == 0, ended.said
    assert (ended.figures["completion_tokens.min"], ended.figures["completion_tokens.max"]) == (4, 40)
    assert ended.figures["tail_ratio.min"] > 1
    refused = await locust("trainer", rig.url, tmp_path, *options)
    assert refused.code == 1
    assert "use --ask prompt" in refused.said


async def test_agents_in_two_processes(rig: Rig, tmp_path: Path) -> None:
    options = ["-u", "4", "-r", "4", "-t", "4s", "--turns", "3", "--tool-gap", "0.01", "--tool-tokens", "4"]
    ended = await locust("agents", rig.url, tmp_path, *options, "--processes", "2")
    assert ended.code == 0, ended.said
    assert ended.figures["session_s.count"] >= 1
    assert ended.figures["later_turn_s.count"] >= 2 * ended.figures["session_s.count"]


@pytest.mark.parametrize("processes", [(), ("--processes", "2")])
async def test_a_url_without_a_server_ends_the_run_at_once(tmp_path: Path, processes: tuple[str, ...]) -> None:
    for url in (f"http://127.0.0.1:{free_port()}", "localhost:8100"):
        ended = await locust("trainer", url, tmp_path, "-t", "60s", *processes)
        assert ended.code == 2
        assert ended.said.count("no server to load") == 1
        assert not ended.figures


async def test_a_threshold_that_is_missed_fails_the_run(rig: Rig, tmp_path: Path) -> None:
    bounds = tmp_path / "bounds.yaml"
    bounds.write_text("failures: {max: 0}\nmakespan_s.p50: {max: 0.001}\n")
    options = ["-t", "1s", "--prompts", "2", "--samples", "2", "--thresholds", str(bounds)]
    ended = await locust("trainer", rig.url, tmp_path, *options)
    assert ended.code == 3
    lines = [line for line in ended.said.splitlines() if line.startswith(("met", "MISSED"))]
    assert lines[0] == "met     failures = 0, at most 0"
    assert lines[1].startswith("MISSED  makespan_s.p50 = ")
    assert "at most 0.001: over by " in lines[1]
    bounds.write_text("makespan_s.p50: 3\n")
    refused = await locust("trainer", rig.url, tmp_path, *options)
    assert refused.code == 2
    assert "makespan_s.p50: 3 is no bound" in refused.said
