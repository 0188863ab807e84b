"""More and fewer replicas of a running application: what Serve is told, and what becomes of rollouts meanwhile."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engines.config import SimConfig
from engines.process.port import free_port
from loadtests.chaos.clients.callers import Callers
from loadtests.chaos.faults import Newest
from tests.gateway.cli.test_main import cluster_shell, script, shell  # noqa: F401  # fixtures
from tests.rigs.rig import StartRig
from tests.rigs.shell import Shell
from trainer_client.blocking import LoopThread

LONG = {"sim": {"decode_step_s": 0.01, "mean_tokens": 10_000}}
ROLLOUT = {"max_tokens": 80, "ignore_eos": True}
SIM = SimConfig(decode_step_s=0.02)


async def test_a_replica_that_serve_removes_finishes_what_it_has_and_gets_nothing_new(start_rig: StartRig) -> None:
    rig = await start_rig(2, **LONG)
    running = [asyncio.create_task(rig.complete([digit], **ROLLOUT)) for digit in range(3, 9)]
    while [replica.load_samples for replica in rig.fleet.replicas] != [3, 3]:
        await asyncio.sleep(0.01)
    assert rig.fleet.drain("engine-1") == 3
    await rig.until({"engine-0": "SERVING", "engine-1": "DRAINING"})
    placed = next(replica.placed for replica in rig.fleet.replicas if replica.replica_id == "engine-1")
    later = [asyncio.create_task(rig.complete([digit], max_tokens=2)) for digit in range(3, 7)]
    rig.hurry()
    replies = await asyncio.gather(*running, *later)
    assert all(reply["choices"][0]["finish_reason"] for reply in replies)
    assert rig.fleet.drain("engine-1") == 0
    (leaving,) = (replica for replica in rig.fleet.replicas if replica.replica_id == "engine-1")
    assert leaving.placed == placed
    assert leaving.state == "DRAINING"  # its probes go on and do not bring it back
    gone = rig.replicas.pop(1)
    await gone.kill()
    await rig.until({"engine-0": "SERVING"})


async def test_a_removed_replica_belongs_to_no_weight_update_and_breaks_its_group(start_rig: StartRig) -> None:
    rig = await start_rig(2)
    await rig.open_group()
    rig.fleet.drain("engine-1")
    status, reply = await rig.post("/start_weight_update", {})
    assert status == 424
    assert "engine-1 left it (DRAINING" in reply["error"]["message"]
    assert (await rig.get("/get_world_size"))[1] == {"world_size": 1}
    await rig.open_group()
    await rig.update()


async def test_the_fleet_is_complete_by_what_it_was_told_to_expect(start_rig: StartRig) -> None:
    rig = await start_rig(2)
    assert (await rig.get("/health"))[0] == 200
    rig.fleet.expect({"engine": 3, "unknown": 9})
    status, report = await rig.get("/health")
    assert (status, report["replicas_expected"]) == (503, 3)
    await rig.add_replica("engine-2", seed=2)
    await rig.until(dict.fromkeys(("engine-0", "engine-1", "engine-2"), "SERVING"))
    assert (await rig.get("/health"))[0] == 200
    rig.fleet.expect({"engine": 1})
    rig.fleet.drain("engine-2")
    rig.fleet.drain("engine-1")
    assert (await rig.get("/health"))[0] == 200


@contextmanager
def loaded(url: str) -> Iterator[None]:
    """Clients of all kinds that ask without pause: every token of theirs must come, once, without asking again."""
    callers, loop = Callers(url, SIM, Newest(), tokens=80, bound_s=120), LoopThread("callers")

    async def begin() -> None:
        callers.start(1)

    loop.wait(begin())
    try:
        yield
        tally = loop.wait(callers.stop()).tally
    finally:
        loop.close(callers.close)
    assert tally.delivered == tally.submitted > 50
    assert tally.is_clean, tally
    assert not tally.retried, tally


@pytest.fixture
def up(cluster_shell: Shell) -> tuple[Shell, str]:  # noqa: F811
    """An application of two slow simulated engines, and its rollout URL."""
    port = free_port()
    (cluster_shell.folder / "sim.yaml").write_text(
        "engine: {kind: sim, model: sim, num_replicas: 2, num_cpus: 0.1, stop_timeout_s: 1, "
        "sim: {decode_step_s: 0.02}}\n"
        f"gateway: {{port: {port}}}\nserve: {{http_port: {free_port()}}}\n"
    )
    done = cluster_shell.run("up", "-c", "sim.yaml")
    assert done.returncode == 0, done.stderr
    return cluster_shell, f"http://127.0.0.1:{port}"


def found(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=60) as response:
        return json.load(response)


def serving(url: str) -> dict[str, int]:
    replicas = found(url, "/status")["replicas"]
    return {one["replica_id"]: one["pid"] for one in replicas if one["state"] == "SERVING"}


def restarts(url: str) -> list[int]:
    return [replica["restarts"] for replica in found(url, "/status")["replicas"]]


@pytest.mark.ray
def test_scaling_from_two_to_four_and_one_under_load_loses_and_repeats_no_rollout(up: tuple[Shell, str]) -> None:
    shell, url = up  # noqa: F811
    before = serving(url)
    assert len(before) == 2
    with loaded(url):
        grown = shell.run("up", "-c", "sim.yaml", "engine.num_replicas=4")
        assert grown.returncode == 0, grown.stderr
        four = serving(url)
        assert len(four) == 4
        assert before.items() <= four.items()  # nobody was started anew
        shrunk = shell.run("up", "-c", "sim.yaml", "engine.num_replicas=1")
        assert shrunk.returncode == 0, shrunk.stderr
        one = serving(url)
        assert len(one) == 1
        assert one.items() <= four.items()
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        retries = [line for line in response.read().decode().splitlines() if "rollout_gateway_retries_total{" in line]
    assert retries
    assert all(line.endswith(" 0.0") for line in retries)
    assert "engine: 2 -> 4 replicas; nothing restarts" in grown.stderr
    assert restarts(url) == [0]
