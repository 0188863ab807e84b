"""A gateway of several processes: the same answers, updates and errors as of one, and deaths that cost no more than
they have to."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from engines.config import SimConfig
from engines.process.port import free_port
from tests.rigs.forked_gateway import ForkedGateway
from tests.rigs.rig import Json, Rig, SimReplica, StartRig
from tests.rigs.sessions import record

WORKERS = 2
TOKENS = {"model": "sim", "prompt": [5, 6, 7], "max_tokens": 32, "ignore_eos": True, "return_token_ids": True}
SLOW = {"decode_step_s": 0.02}


@asynccontextmanager
async def clients(rig: Rig) -> AsyncIterator[list[aiohttp.ClientSession]]:
    """A client of each worker, in their order, with one connection each, which stays open where all replies are read
    to their end. The rig's own is closed: connections go to the worker that has the fewest, the first of several."""
    await rig.client.close()
    rig.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1, force_close=True))
    async with asyncio.timeout(30):
        while any(worker["connections"] for worker in rig.workers):
            await asyncio.sleep(0.05)
    found = [aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) for _ in range(WORKERS)]
    try:
        for client in found:
            async with client.get(f"{rig.url}/health") as response:
                assert response.status == 200
                await response.read()
        async with asyncio.timeout(30):  # a connection that has just begun may be counted twice in one report
            while [worker["connections"] for worker in rig.workers] != [1] * WORKERS:
                await asyncio.sleep(0.05)
        yield found
    finally:
        for client in found:
            await client.close()


async def until_serving(rig: Rig, *, restarts: int = 0) -> None:
    async with asyncio.timeout(60):
        while True:
            found = rig.workers
            if all(worker["is_serving"] for worker in found) and sum(one["restarts"] for one in found) >= restarts:
                return
            await asyncio.sleep(0.05)


async def completed(client: aiohttp.ClientSession, rig: Rig, **fields: Any) -> Json:
    async with client.post(f"{rig.url}/v1/completions", json={**TOKENS, **fields}) as response:
        reply: Json = await response.json()
        assert response.status == 200, reply
        return reply


async def streamed(rig: Rig, place: int, **fields: Any) -> Json:
    """A stream over a connection of its own as one reply; the `place`-th of several that begin together."""
    choice: Json = {"token_ids": []}
    await asyncio.sleep(0.02 * place)
    asked = {**TOKENS, **fields, "stream": True}
    async with aiohttp.ClientSession() as client, client.post(f"{rig.url}/v1/completions", json=asked) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                (part,) = orjson.loads(line[6:])["choices"]
                choice = choice | part | {"token_ids": choice["token_ids"] + (part["token_ids"] or [])}
    return {"choices": [choice]}


def in_flight(rig: Rig) -> int:
    return sum(replica.load_samples for replica in rig.fleet.replicas)


async def until_told(rig: Rig, sample: str) -> str:
    """Return the page of metrics that has this line; workers report once a second."""
    async with asyncio.timeout(30):
        while sample not in (page := await (await rig.client.get(f"{rig.url}/metrics")).text()):
            await asyncio.sleep(0.05)
    return page


async def until_in_flight(rig: Rig, number: int) -> None:
    async with asyncio.timeout(30):
        while in_flight(rig) != number:
            await asyncio.sleep(0.01)


async def test_turns_of_a_session_are_recorded_whichever_worker_has_the_client(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway={"workers": WORKERS})
    _, begun = await rig.post("/v1/sessions", {"id": "one"})
    body = {"model": "sim", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    async with clients(rig) as found:
        for client in found:
            for path, key in (("/v1/chat/completions", begun["key"]), ("/sessions/one/v1/messages", "k")):
                headers = {"Authorization": f"Bearer {key}"}
                async with client.post(rig.url + path, json=body, headers=headers) as response:
                    assert response.status == 200, await response.text()
    head, calls = await record(rig, "one")
    assert (head["calls"], [call["dialect"] for call in calls]) == (4, ["chat", "messages"] * WORKERS)


async def test_every_dialect_is_answered_as_by_one_process(start_rig: StartRig) -> None:
    rig = await start_rig(2, gateway={"workers": WORKERS})
    samples = (await completed(rig.client, rig, prompt=[[5, 6], [7, 8]], n=2))["choices"]
    assert [choice["index"] for choice in samples] == [0, 1, 2, 3]
    assert all(choice["weight_versions"] == [{"version": 0, "start": 0, "end": 32}] for choice in samples)
    async with rig.client.post(f"{rig.url}/v1/completions", json={**TOKENS, "stream": True}) as response:
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    status, chat = await rig.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert (status, chat["choices"][0]["message"]["role"]) == (200, "assistant")
    asked = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    status, tokens = await rig.post("/inference/v1/generate", asked)
    assert (status, len(tokens["choices"][0]["token_ids"])) == (200, 4)
    status, words = await rig.post("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 4}})
    assert (status, words["meta_info"]["weight_version"]) == (200, "0")


async def test_other_routes_and_wrong_requests_are_answered_by_the_owner(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway={"workers": WORKERS, "max_body_bytes": 10_000})
    status, models = await rig.get("/v1/models")
    assert (status, [model["id"] for model in models["data"]]) == (200, ["sim"])
    status, reply = await rig.post("/v1/completions", {**TOKENS, "model": "judge"})
    assert (status, reply["error"]["param"]) == (404, "model")
    assert "LoRA adapters: none" in reply["error"]["message"], "the owner knows them"
    status, reply = await rig.get("/no/such/route")
    assert status == 404
    deep = b'{"model": "judge", "prompt": "a", "extra": ' + b"[" * 400 + b"]" * 400 + b"}"  # read, but never written
    async with rig.client.post(f"{rig.url}/v1/completions", data=deep) as response:
        assert response.status == 404, await response.text()
    inflated = {"Content-Encoding": "gzip"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{rig.url}/tokenize", data=b"no gzip", headers=inflated) as response,
    ):
        assert (response.status, "cannot be read" in await response.text()) == (400, True)
    for path in ("/v1/completions", "/tokenize"):  # one is a worker's, the other goes through it
        status, reply = await rig.post(path, {"prompt": "x" * 20_000})
        assert (status, "max_body_bytes" in reply["error"]["message"]) == (413, True)


async def test_a_trainer_that_leaves_loses_its_lease_over_a_worker_too(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway={"workers": WORKERS})
    await rig.open_group()
    named = {"lease": "mine"}
    async with aiohttp.ClientSession() as trainer, trainer.post(f"{rig.url}/v1/weight_lease", json=named) as lease:
        assert lease.status == 200
        assert await lease.content.read(1) == b"\n"
        status, _ = await rig.post("/start_weight_update", named)
        assert status == 200
    async with asyncio.timeout(20):
        while (await rig.get("/status"))[1]["weight_update"] is not None:
            await asyncio.sleep(0.02)
    await rig.until({"engine-0": "SERVING"})


@pytest.mark.parametrize("in_flight_mode", ["keep", "abort", "recompute", "drain"])
async def test_an_update_meets_rollouts_in_every_worker_and_no_token_has_wrong_weights(
    start_rig: StartRig, in_flight_mode: str
) -> None:
    rig = await start_rig(2, gateway={"workers": WORKERS}, weights={"in_flight": in_flight_mode}, sim=SLOW)
    await rig.open_group()
    async with clients(rig) as ours:
        whole = [asyncio.create_task(completed(client, rig, n=2, max_tokens=60)) for client in ours]
        streams = [asyncio.create_task(streamed(rig, index, max_tokens=60)) for index in range(WORKERS)]
        await rig.begun(3 * WORKERS)
        assert all(worker["rollouts"] for worker in rig.workers)
        if in_flight_mode == "drain":
            rig.go_on()
        await rig.update()
        rig.go_on()
        replies = [*await asyncio.gather(*whole), *await asyncio.gather(*streams)]
        late = [await completed(client, rig) for client in ours]
    for choice in [choice for reply in replies for choice in reply["choices"]]:
        check_spans(choice, 60)
    versions = {
        span["version"] for reply in replies for choice in reply["choices"] for span in choice["weight_versions"]
    }
    assert versions <= {0, 1}
    assert in_flight_mode == "drain" or 1 in versions, "the update met them in flight"
    for choice in (choice for reply in late for choice in reply["choices"]):
        assert choice["weight_versions"] == [{"version": 1, "start": 0, "end": 32}]


def check_spans(choice: Json, tokens: int) -> None:
    """The engine names the version in each token, so a span is wrong where it names another."""
    assert len(choice["token_ids"]) == tokens
    assert choice["finish_reason"] == "length"
    spans = choice["weight_versions"]
    assert [spans[0]["start"], spans[-1]["end"]] == [0, tokens]
    assert all(one["end"] == other["start"] for one, other in pairwise(spans))


async def test_a_worker_that_dies_breaks_its_own_connections_alone_and_comes_back(start_rig: StartRig) -> None:
    rig = await start_rig(2, gateway={"workers": WORKERS}, sim=SLOW)
    async with clients(rig) as (first, second):
        dying = asyncio.create_task(completed(first, rig, max_tokens=100))
        living = asyncio.create_task(completed(second, rig, max_tokens=100))
        await rig.begun(2)
        os.kill(rig.workers[0]["pid"], signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await dying
        await until_in_flight(rig, 1)
        rig.hurry()
        assert len((await living)["choices"][0]["token_ids"]) == 100
        await until_serving(rig, restarts=1)
        assert len((await completed(first, rig))["choices"][0]["token_ids"]) == 32
    await until_in_flight(rig, 0)
    _, status = await rig.get("/status")
    assert any(event["subject"].startswith("worker") for event in status["events"]), status["events"]


async def test_the_death_of_the_owner_ends_its_workers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = await SimReplica("engine-0", 0, SimConfig.model_validate(SLOW)).start()
    port = free_port()
    gateway = ForkedGateway(port, engine.info.url, tmp_path / "log", workers=WORKERS)
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as client:
            await gateway.serve(client)
            found = [worker["pid"] for worker in await status_of_workers(client, url)]
            folder = folder_of(found[0])
            assert permissions(folder) == 0o700, "its doors are for this user alone"
            running = asyncio.create_task(client.post(f"{url}/v1/completions", json={**TOKENS, "max_tokens": 100}))
            while not engine.scheduler.running:
                await asyncio.sleep(0.01)
            gateway.kill()
            with pytest.raises(aiohttp.ClientError):
                await running
            async with asyncio.timeout(20):
                while any(map(runs, found)):
                    await asyncio.sleep(0.01)
            assert not permissions(folder)
            await gateway.serve(client)  # on the same port
            assert [worker["is_serving"] for worker in await status_of_workers(client, url)] == [True] * WORKERS
    finally:
        gateway.kill()
        await engine.kill()


def folder_of(worker: int) -> Path:
    """The last argument of a worker's command."""
    return Path(os.fsdecode(Path(f"/proc/{worker}/cmdline").read_bytes().split(b"\0")[-2]))


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def permissions(folder: Path) -> int:
    """0 where there is no such folder."""
    return folder.stat().st_mode & 0o777 if folder.exists() else 0


async def status_of_workers(client: aiohttp.ClientSession, url: str) -> list[Json]:
    async with client.get(f"{url}/status") as response:
        return list((await response.json())["workers"])


async def test_an_abort_by_id_finds_its_request_in_any_worker(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway={"workers": WORKERS}, sim=SLOW)
    async with clients(rig) as (first, second):
        for path, body, ending in (
            (
                "/generate",
                {"text": "abc", "rid": "one", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}},
                ("/abort_request", {"rid": "one"}),
            ),
        ):
            running = asyncio.create_task(posted(first, rig, path, body))
            await rig.begun(1)
            status, _ = await posted(second, rig, *ending)
            assert status == 200
            status, reply = await running
            assert (status, reply["meta_info"]["finish_reason"]["type"]) == (200, "abort")
        await until_in_flight(rig, 0)


async def posted(client: aiohttp.ClientSession, rig: Rig, path: str, body: Json) -> tuple[int, Any]:
    async with client.post(rig.url + path, json=body) as response:
        content = await response.read()
        return response.status, (await response.json()) if content else None


@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_batch_whose_connection_broke_is_adopted_over_another_worker(
    start_rig: StartRig, tmp_path: Path, is_kept: bool
) -> None:
    """A ledger is kept by the owner, and then it runs all batches."""
    ledger = str(tmp_path / "ledger") if is_kept else None
    rig = await start_rig(1, gateway={"workers": WORKERS, "ledger": ledger}, sim=SLOW)
    async with clients(rig) as (first, second):
        leaving = asyncio.create_task(completed(first, rig, n=4, max_tokens=60))
        await rig.begun(4)
        assert sum(worker["rollouts"] for worker in rig.workers) == (0 if is_kept else 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until_told(rig, "rollout_gateway_orphaned_batches_total 1.0")
        placed = sum(replica.placed for replica in rig.fleet.replicas)
        adopting = asyncio.create_task(completed(second, rig, n=4, max_tokens=60))
        await until_told(rig, 'rollout_gateway_orphaned_batch_ends_total{end="adopted"} 1.0')
        rig.hurry()
        reply = await adopting
    assert len(reply["choices"]) == 4
    assert sum(replica.placed for replica in rig.fleet.replicas) == placed, "nothing was made twice"
