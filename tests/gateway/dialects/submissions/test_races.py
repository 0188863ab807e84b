"""Submissions under races: clients that share an id, reads beside ends, cancels at any await, faults of the ledger."""

import asyncio
from pathlib import Path

import pytest

from gateway.dialects.submissions.group_run import GroupRun
from gateway.dialects.submissions.submission import Submission
from gateway.ledger.folder import Folder
from tests.rigs.calls import until
from tests.rigs.rig import Rig
from tests.rigs.submissions import detached, of_type, outcomes, read, samples, submitted

GROUPS = [{"prompt": [5, 6, number + 7], "n": 2} for number in range(20)]
ALL = [(group, sample) for group in range(20) for sample in range(2)]


async def test_many_clients_with_one_id_make_one_submission(kept_rig: Rig) -> None:
    streams = await asyncio.gather(*(submitted(kept_rig, GROUPS, id="one") for _ in range(12)))
    assert all(events[1:] == streams[0][1:] for events in streams)
    assert sorted(samples(streams[0])) == ALL
    assert sum(replica.generated_tokens for replica in kept_rig.replicas) == 40 * 8


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
    await until(lambda: not any(replica.load_samples for replica in kept_rig.fleet.replicas))


@pytest.mark.parametrize("turns", [0, 1, 2, 4, 8, 16, 32, 64])
async def test_a_client_that_leaves_at_any_await_harms_nothing(kept_rig: Rig, turns: int) -> None:
    asking = asyncio.create_task(submitted(kept_rig, GROUPS, id="one"))
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert sorted(samples(await submitted(kept_rig, GROUPS, id="one"))) == ALL
    assert sum(replica.generated_tokens for replica in kept_rig.replicas) == 40 * 8


async def test_a_disk_that_fails_costs_durability_alone(
    kept_rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await detached(kept_rig, "one", GROUPS[:2])
    await kept_rig.begun(samples=4)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Folder, "append", full)
        kept_rig.hurry()
        events = await read(kept_rig, "one")
    assert sorted(samples(events)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    [head] = [event for event in (await submitted(kept_rig, id="two")) if event["type"] == "submission"]
    assert not head["durable"]
    report = (await kept_rig.get("/status"))[1]["ledger"]
    assert (report["durable"], "No space left" in report["failure"]) == (False, True)


async def test_a_fault_of_the_program_ends_groups_and_their_submission(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("what nobody foresaw")

    with monkeypatch.context() as program:
        program.setattr(GroupRun, "_begun", fails)
        events = await submitted(rig, GROUPS[:2])
    assert outcomes(events) == {0: "failed", 1: "failed"}
    assert {event["error"]["code"] for event in of_type(events, "group")} == {500}
    with monkeypatch.context() as program:
        program.setattr(Submission, "write", fails)
        events = await submitted(rig, GROUPS[:2])
    assert (outcomes(events), events[-1]["type"]) == ({0: "failed", 1: "failed"}, "end")
