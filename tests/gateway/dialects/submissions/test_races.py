"""Submissions under races: clients that share an id, reads beside ends, cancels at any await, faults of the ledger."""

import asyncio
import random
from pathlib import Path

import aiohttp
import pytest

from gateway.dialects.submissions.group_run import GroupRun
from gateway.dialects.submissions.submission import Submission
from gateway.ledger import ledger as ledger_module
from gateway.ledger import shared
from gateway.ledger.file import LedgerFile
from tests.rigs.rig import Json, Rig, StartRig
from tests.rigs.submissions import GROUP, ack, body, detached, lines, of_type, outcomes, read, samples, submitted

GROUPS = [{"prompt": [5, 6, number + 7], "n": 2} for number in range(20)]
ALL = [(group, sample) for group in range(20) for sample in range(2)]


@pytest.fixture
async def kept_rig(start_rig: StartRig, tmp_path: Path) -> Rig:
    """Two replicas behind a gateway with a ledger."""
    return await start_rig(2, gateway={"ledger": str(tmp_path / "ledger.sqlite")})


async def test_many_clients_with_one_id_make_one_submission(kept_rig: Rig) -> None:
    streams = await asyncio.gather(*(submitted(kept_rig, GROUPS, id="one") for _ in range(12)))
    assert all(events[1:] == streams[0][1:] for events in streams)
    assert sorted(samples(streams[0])) == ALL
    assert sum(replica.generated_tokens for replica in kept_rig.replicas) == 40 * 8


async def test_one_of_many_with_other_groups_is_refused_and_the_rest_joined(kept_rig: Rig) -> None:
    asked = [body(GROUPS, id="one"), body([GROUP], id="one")] * 4
    replies = await asyncio.gather(*(kept_rig.client.post(kept_rig.url + "/v1/rollouts", json=one) for one in asked))
    statuses = [reply.status for reply in replies]
    assert sorted(statuses) == [200] * 4 + [409] * 4
    assert len(set(statuses[::2])) == len(set(statuses[1::2])) == 1
    for reply in replies:
        await reply.read()


async def test_readers_at_any_moment_have_each_event_once(kept_rig: Rig) -> None:
    await detached(kept_rig, "one", GROUPS)

    async def reader(seed: int) -> list[Json]:
        """Read with connections that break after any number of events."""
        draw, cursor, found = random.Random(seed), 0, list[Json]()
        while not found or found[-1]["type"] != "end":
            url = f"{kept_rig.url}/v1/rollouts/one?cursor={cursor}"
            async with kept_rig.client.get(url) as response:
                await response.content.readline()
                for _ in range(draw.randint(0, 7)):
                    if not (line := await response.content.readline()):
                        break
                    found += lines(line)
                    cursor = found[-1]["cursor"]
        return found

    streams = await asyncio.gather(*(reader(seed) for seed in range(6)))
    assert all(events == streams[0] for events in streams)
    assert sorted(samples(streams[0])) == ALL


async def test_an_ack_beside_a_read_takes_nothing_from_it(kept_rig: Rig) -> None:
    found: list[Json] = []
    async with kept_rig.client.post(kept_rig.url + "/v1/rollouts", json=body(GROUPS, id="one")) as response:
        await response.content.readline()
        while line := await response.content.readline():
            found += lines(line)
            await ack(kept_rig, "one", found[-1]["cursor"])
    assert sorted(samples(found)) == ALL
    assert (await kept_rig.get("/status"))[1]["ledger"]["kept_bytes"] == 0


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144])
async def test_a_cancel_at_any_await_ends_each_group_once(kept_rig: Rig, turns: int) -> None:
    asking = asyncio.create_task(submitted(kept_rig, GROUPS, id="one"))
    async with asyncio.timeout(20):
        while (await kept_rig.get("/v1/rollouts/one?cursor=1"))[0] == 404:
            await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    async with kept_rig.client.delete(kept_rig.url + "/v1/rollouts/one") as response:
        assert response.status == 200
    events = await asking
    assert sorted(event["group"] for event in of_type(events, "group")) == list(range(20))
    assert set(outcomes(events).values()) <= {"delivered", "cancelled"}
    assert len(set(samples(events))) == len(samples(events))
    async with asyncio.timeout(20):
        while any(replica.load_samples for replica in kept_rig.fleet.replicas):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("turns", [0, 1, 2, 4, 8, 16, 32, 64])
async def test_a_client_that_leaves_at_any_await_harms_nothing(kept_rig: Rig, turns: int) -> None:
    asking = asyncio.create_task(submitted(kept_rig, GROUPS, id="one"))
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert sorted(samples(await submitted(kept_rig, GROUPS, id="one"))) == ALL
    assert sum(replica.generated_tokens for replica in kept_rig.replicas) == 40 * 8


async def test_two_that_resume_one_group_get_it_once(rig: Rig) -> None:
    await detached(rig, "first", [GROUP], on_deadline="resume")
    await rig.begun(samples=1, tokens=6)
    await rig.post("/v1/rollouts/first/deadline")
    rig.hurry()
    resume: Json = {"resume": {"id": "first", "group": 0}}
    replies = await asyncio.gather(*(rig.post("/v1/rollouts", body([resume], stream=False)) for _ in range(5)))
    assert sorted(status for status, _ in replies) == [202, 400, 400, 400, 400]
    status, error = await rig.post("/v1/rollouts", body([resume, resume]))
    assert status == 400, error


async def test_a_disk_that_fails_costs_durability_alone(
    kept_rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await detached(kept_rig, "one", GROUPS[:2])
    await kept_rig.begun(samples=4)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(LedgerFile, "grow", full)
        disk.setattr(LedgerFile, "add_event", full)
        kept_rig.hurry()
        events = await read(kept_rig, "one")
    assert sorted(samples(events)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    [head] = [event for event in (await submitted(kept_rig, id="two")) if event["type"] == "submission"]
    assert not head["durable"]
    report = (await kept_rig.get("/status"))[1]["ledger"]
    assert (report["durable"], "No space left" in report["failure"]) == (False, True)


async def test_a_ledger_that_is_kept_again_has_all_that_memory_has(
    start_rig: StartRig, kept_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_RETRY_S", 0.0)
    first = await submitted(kept_rig, GROUPS[:2], id="one")
    await ack(kept_rig, "one", first[2]["cursor"])
    await detached(kept_rig, "two", [{"prompt": "abc", "n": 2}])
    await kept_rig.begun(samples=2)
    with monkeypatch.context() as disk:
        disk.setattr(ledger_module, "_STUCK_S", -1.0)
        await detached(kept_rig, "three", [GROUP])
        async with asyncio.timeout(20):
            while (await kept_rig.get("/status"))[1]["ledger"]["durable"]:
                await detached(kept_rig, "three", [GROUP])
    async with asyncio.timeout(20):
        while not (await kept_rig.get("/status"))[1]["ledger"]["durable"]:
            await asyncio.sleep(0.05)
    await kept_rig.stop_gateway()
    gateway = kept_rig.config.gateway.model_dump(include={"ledger"})
    again = await start_rig(2, replicas=kept_rig.replicas, gateway=gateway)
    again.hurry()
    assert (await read(again, "one"))[1:] == first[3:]
    assert sorted(samples(await read(again, "two"))) == [(0, 0), (0, 1)]
    assert samples(await read(again, "three")) == [(0, 0)]


async def test_connections_that_are_cut_in_the_head_leave_no_reader(kept_rig: Rig) -> None:
    await detached(kept_rig, "one")
    await kept_rig.begun(samples=1)
    for _ in range(20):
        with pytest.raises((asyncio.TimeoutError, aiohttp.ClientError)):
            await kept_rig.get("/v1/rollouts/one", timeout=aiohttp.ClientTimeout(total=0.02))
    kept_rig.hurry()
    assert samples(await read(kept_rig, "one")) == [(0, 0)]


async def test_a_fault_of_the_program_ends_groups_and_their_submission(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("what nobody foresaw")

    with monkeypatch.context() as program:
        program.setattr(GroupRun, "_prompt", fails)
        events = await submitted(rig, GROUPS[:2])
    assert outcomes(events) == {0: "failed", 1: "failed"}
    assert {event["error"]["code"] for event in of_type(events, "group")} == {500}
    with monkeypatch.context() as program:
        program.setattr(Submission, "write", fails)
        events = await submitted(rig, GROUPS[:2])
    assert (outcomes(events), events[-1]["type"]) == ({0: "failed", 1: "failed"}, "end")
