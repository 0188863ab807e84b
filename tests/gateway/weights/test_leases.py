"""A trainer's lease: its end ends the update that the trainer left open, at once."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from tests.rigs.calls import until
from tests.rigs.rig import Rig

PROGRAM = """
import json, os, sys, time
from trainer_client import BlockingRolloutClient
url, init_info, tensors, received = sys.argv[1], *map(json.loads, sys.argv[2:5])
client = BlockingRolloutClient(url)
with client.weight_lease() as lease:
    client.init_weight_transfer(init_info)
    client.start_weight_update(lease=lease)
    if received:
        client.update_weights(tensors, lease=lease)
    worker = os.fork() if sys.argv[5:] else None
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    print("open", worker, flush=True)
    sys.stdin.read()
"""
INIT = '{"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3, "packed": true}'
TENSORS = '{"names": ["weight"], "dtype_names": ["float32"], "shapes": [[4, 4]]}'
NOTICED_S = 5.0


@contextlib.asynccontextmanager
async def trainer(rig: Rig, received: bool, *forks: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A trainer in a process of its own, between two calls of its update. With `forks` it has a forked worker."""
    words = [sys.executable, "-c", PROGRAM, rig.url, INIT, TENSORS, "true" if received else "false", *forks]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    worker = "None"
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            said, worker = (await process.stdout.readline()).decode().split()
        assert said == "open"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        if worker != "None":
            os.kill(int(worker), signal.SIGKILL)
        await process.communicate(b"")  # its end alone would leave its pipes to the loop of the next test


@pytest.mark.parametrize("received", [True, False])
async def test_a_trainer_that_is_killed_between_two_calls_frees_the_fleet_at_once(rig: Rig, received: bool) -> None:
    async with trainer(rig, received) as process:
        _, status = await rig.get("/status")
        assert status["weight_update"]["phase"] == ("RECEIVING" if received else "OPEN")
        process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(NOTICED_S):
            while (await rig.get("/status"))[1]["weight_update"] is not None:
                await asyncio.sleep(0.02)
            reply = await rig.complete([[5]])
    assert reply["choices"][0]["weight_versions"][0]["version"] == 0
    _, updates = await rig.get("/v1/weight_updates")
    assert updates["weight_updates"][0]["error"] == "the trainer's connection has ended"
    await rig.open_group()
    await rig.update()


async def test_a_worker_that_a_killed_trainer_has_forked_keeps_no_update_open(rig: Rig) -> None:
    async with trainer(rig, True, "and forks") as process:
        process.send_signal(signal.SIGKILL)
        await until(lambda: rig.get("/status"), lambda got: got[1]["weight_update"] is None, timeout_s=NOTICED_S)


async def test_calls_under_another_lease_leave_an_update_as_it_is(rig: Rig) -> None:
    await rig.open_group()
    async with rig.client.post(f"{rig.url}/v1/weight_lease", json={"lease": "mine"}):
        assert (await rig.post("/start_weight_update", {"lease": "mine"}))[0] == 200
        tensors = {"update_info": rig.tensors}
        for other in ({}, {"lease": "another"}):
            for path, body in (("/update_weights", tensors), ("/finish_weight_update", {})):
                status, reply = await rig.post(path, body | other)
                assert (status, "another trainer's" in reply["error"]["message"]) == (409, True)
        async with rig.client.delete(f"{rig.url}/v1/weight_updates", json={"lease": "another"}) as refused:
            assert refused.status == 409
        assert (await rig.post("/update_weights", tensors | {"lease": "mine"}))[0] == 200
        assert (await rig.post("/finish_weight_update", {"lease": "mine"}))[1]["weight_version"] == 1


async def test_a_second_trainer_opens_no_group_while_the_first_holds_its_update(rig: Rig) -> None:
    await rig.open_group()
    async with rig.client.post(f"{rig.url}/v1/weight_lease", json={"lease": "first"}) as answer:
        assert answer.status == 200
        assert (await rig.post("/start_weight_update", {"lease": "first"}))[0] == 200
        status, reply = await rig.post("/init_weight_transfer_engine", {"init_info": json.loads(INIT)})
        assert (await rig.post("/v1/weight_lease", {"lease": "x" * 101}))[1]["error"]["param"] == "lease"
        assert (status, "wait for its trainer, which lives" in reply["error"]["message"]) == (409, True)
        tensors = {"update_info": rig.tensors, "lease": "first"}
        assert (await rig.post("/update_weights", tensors))[0] == 200
    # Its connection has ended, which the gateway may not have noticed yet.
    assert (await rig.post("/init_weight_transfer_engine", {"init_info": json.loads(INIT)}))[0] == 200
    assert (await rig.get("/status"))[1]["weight_update"] is None


async def test_a_trainer_whose_group_another_has_replaced_opens_no_update(rig: Rig) -> None:
    place = {"group": "127.0.0.1:1"}
    status, reply = await rig.post("/start_weight_update", place)
    assert (status, "is gone, as after a restart of the gateway" in reply["error"]["message"]) == (424, True)
    for info in (json.loads(INIT), json.loads(INIT) | {"master_port": 2}):
        assert (await rig.post("/init_weight_transfer_engine", {"init_info": info}))[0] == 200
    status, reply = await rig.post("/start_weight_update", place)
    assert (status, "another trainer has opened one, of 127.0.0.1:2" in reply["error"]["message"]) == (409, True)
    assert (await rig.get("/status"))[1]["weight_update"] is None
    assert (await rig.post("/start_weight_update", {"group": "127.0.0.1:2"}))[0] == 200


async def test_a_trainer_without_a_lease_is_refused_at_once_in_the_group_of_one_with_a_lease(rig: Rig) -> None:
    await rig.open_group()
    async with rig.client.post(f"{rig.url}/v1/weight_lease", json={"lease": "a"}):
        init = {"init_info": json.loads(INIT), "lease": "a"}
        assert (await rig.post("/init_weight_transfer_engine", init))[0] == 200
    status, reply = await rig.post("/start_weight_update", {})
    assert (status, "another trainer has opened one, of 127.0.0.1:1" in reply["error"]["message"]) == (409, True)
    await rig.open_group()
    await rig.update()


async def test_a_person_ends_an_update_without_its_lease(rig: Rig) -> None:
    await rig.open_group()
    async with rig.client.post(f"{rig.url}/v1/weight_lease", json={"lease": "mine"}):
        assert (await rig.post("/start_weight_update", {"lease": "mine"}))[0] == 200
        async with rig.client.delete(f"{rig.url}/v1/weight_updates") as ended:
            assert ended.status == 200
        assert (await rig.get("/status"))[1]["weight_update"] is None
