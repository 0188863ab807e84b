"""Submissions go on after a restart of their gateway, from what the ledger has: nothing lost, nothing twice."""

import asyncio
import shutil
import time
from pathlib import Path

import pytest

from gateway.ledger import ledger
from tests.rigs.calls import until
from tests.rigs.rig import Rig, StartRig
from tests.rigs.submissions import GROUP, detached, of_type, outcomes, read, submitted

LENGTH = 60
GROUPS = [{"prompt": [5, 6, number + 7], "n": 2} for number in range(6)]
SAMPLING = {"max_tokens": LENGTH, "ignore_eos": True}


async def restarted(start_rig: StartRig, rig: Rig) -> Rig:
    """A gateway after `rig`'s, with its configuration and its engines."""
    await rig.stop_gateway()
    gateway = rig.config.gateway.model_dump(include={"ledger", "submissions"})
    return await start_rig(2, replicas=rig.replicas, gateway=gateway)


async def written(rig: Rig) -> None:
    """Return when the ledger has all tokens that the gateway has."""
    await until(lambda: rig.get("/status"), lambda got: not got[1]["ledger"]["unwritten"])


async def test_a_kill_right_after_a_cancellation_brings_nothing_back(
    start_rig: StartRig, kept_rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_LINGER_S", 0.3)
    submitting = asyncio.create_task(detached(kept_rig, "one", GROUPS))
    await kept_rig.begun(samples=12)
    await submitting
    async with kept_rig.client.delete(kept_rig.url + "/v1/rollouts/one") as response:
        assert response.status == 200
    left = shutil.copytree(tmp_path / "ledger", tmp_path / "left")  # as a kill leaves it
    await kept_rig.stop_gateway()
    again = await start_rig(2, replicas=kept_rig.replicas, gateway={"ledger": str(left)})
    again.hurry()
    assert outcomes(await read(again, "one")) == dict.fromkeys(range(6), "cancelled")


async def test_a_deadline_that_passed_during_the_restart_ends_the_group(
    start_rig: StartRig, kept_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = GROUP | {"deadline_s": 600, "on_deadline": "return_partial"}
    await detached(kept_rig, "one", [group])
    await kept_rig.begun(samples=1, tokens=6)
    await written(kept_rig)
    await kept_rig.stop_gateway()
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 600)
    again = await restarted(start_rig, kept_rig)
    events = await read(again, "one")
    assert outcomes(events) == {0: "partial"}
    assert [len(sample["token_ids"]) for sample in of_type(events, "sample")] == [6]


async def test_without_a_ledger_a_restart_loses_submissions_and_says_so(start_rig: StartRig) -> None:
    rig = await start_rig(2)
    events = await submitted(rig, id="one")
    assert not events[0]["durable"]
    again = await restarted(start_rig, rig)
    status, error = await again.get("/v1/rollouts/one")
    assert (status, "gateway.ledger" in error["error"]["message"]) == (404, True)


async def test_a_text_prompt_goes_on_from_its_tokens(start_rig: StartRig, kept_rig: Rig) -> None:
    group = {"prompt": "abc", "sampling": {"temperature": 0}}
    [whole] = of_type(await submitted(kept_rig, [group]), "sample")
    made = sum(replica.generated_tokens for replica in kept_rig.replicas)
    await detached(kept_rig, "one", [group])
    await kept_rig.begun(samples=1)
    await written(kept_rig)
    again = await restarted(start_rig, kept_rig)
    again.hurry()
    events = await read(again, "one")
    [sample] = of_type(events, "sample")
    assert sample["token_ids"] == whole["token_ids"]
    assert of_type(events, "group")[0]["prompt_token_ids"]
    assert sum(replica.generated_tokens for replica in kept_rig.replicas) - made == 8


async def test_tokens_of_two_versions_keep_their_spans_over_a_restart(start_rig: StartRig, kept_rig: Rig) -> None:
    await kept_rig.open_group()
    await detached(kept_rig, "one")
    await kept_rig.begun(samples=1, tokens=4)
    await written(kept_rig)
    await kept_rig.stop_gateway()
    for replica in kept_rig.replicas:
        replica.label(1)
    again = await restarted(start_rig, kept_rig)
    again.hurry()
    [sample] = of_type(await read(again, "one"), "sample")
    spans = [(span["version"], span["start"], span["end"]) for span in sample["weight_versions"]]
    assert spans[0] == (0, 0, 4)
    assert spans[-1][2] == 8
