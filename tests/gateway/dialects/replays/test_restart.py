"""Batches go on after a restart of their gateway, from what the ledger has, and their replays adopt them."""

import asyncio
from pathlib import Path

import pytest

from gateway.dialects import replays
from tests.gateway.dialects.replays.test_replays import ALL, BATCH, LENGTH, all_ended, broken, left, made, until, whole
from tests.rigs import calls
from tests.rigs.rig import Json, Rig, StartRig


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are written from their start."""
    monkeypatch.setattr(replays, "_WORTH_IT_S", 0.0)


async def restarted(start_rig: StartRig, rig: Rig) -> Rig:
    """A gateway after `rig`'s, with its configuration and its engines."""
    await rig.stop_gateway()
    gateway = rig.config.gateway.model_dump(include={"ledger", "replay_grace_s"})
    return await start_rig(2, replicas=rig.replicas, gateway=gateway)


async def check_begins_again(start_rig: StartRig, rig: Rig) -> None:
    """That a gateway after `rig`'s has all tokens of a replay made again."""
    again = await restarted(start_rig, rig)
    await all_ended(again)
    before = made(again)
    again.hurry()
    await whole(again)
    assert made(again) - before == ALL


async def written(rig: Rig) -> None:
    """Wait until the ledger has all that has come of a batch."""
    await calls.until(
        lambda: rig.get("/status"), lambda got: (got[1]["ledger"]["batches"], got[1]["ledger"]["unwritten"]) == (1, 0)
    )


async def test_a_replay_after_a_restart_adopts_the_batch_with_its_tokens(start_rig: StartRig, kept_rig: Rig) -> None:
    await left(kept_rig)
    before = made(kept_rig)
    again = await restarted(start_rig, kept_rig)
    again.hurry()
    reply = await whole(again)
    await until(again, "orphaned_batch_ends", 1, end="adopted")
    assert reply["usage"]["completion_tokens"] == ALL
    assert made(again) - before <= ALL - 8 * 4  # a chunk of each sample was noted
    for choice in reply["choices"]:
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": LENGTH}]
        assert len(choice["logprobs"]["token_logprobs"]) == LENGTH


async def test_a_batch_that_was_delivered_is_not_brought_back(start_rig: StartRig, kept_rig: Rig) -> None:
    asking = asyncio.create_task(whole(kept_rig))
    await kept_rig.begun(samples=8)
    await written(kept_rig)
    kept_rig.hurry()
    await asking
    again = await restarted(start_rig, kept_rig)
    await whole(again)
    assert made(again) == 2 * ALL


@pytest.mark.parametrize("change", [{"ledger": None}, {"replay_grace_s": 0}])
async def test_without_ledger_or_grace_a_restart_begins_again(
    start_rig: StartRig, tmp_path: Path, change: Json
) -> None:
    rig = await start_rig(2, gateway={"ledger": str(tmp_path / "ledger")} | change)
    await broken(rig)
    await check_begins_again(start_rig, rig)


async def test_tokens_of_another_runs_weights_are_not_adopted(start_rig: StartRig, kept_rig: Rig) -> None:
    """The gateway and its engines end, and the next ones begin with the checkpoint."""
    for replica in kept_rig.replicas:
        replica.label(3)
    stale = await restarted(start_rig, kept_rig)
    await stale.until({"engine-0": "SERVING", "engine-1": "SERVING"})  # once their canary is over
    await left(stale)
    await stale.stop_gateway()
    again = await start_rig(2, gateway=stale.config.gateway.model_dump(include={"ledger"}))
    again.hurry()
    reply = await whole(again)
    assert {span["version"] for one in reply["choices"] for span in one["weight_versions"]} == {0}
    await until(again, "orphaned_batch_ends", 1, end="stale")


async def test_prompts_that_have_ended_are_not_made_again(start_rig: StartRig, kept_rig: Rig) -> None:
    """Of two prompts one ends at once, and the other's engine stands still."""
    body = BATCH | {"prompt": [[5, 6, 7], [5, 6, 8]], "n": 1, "max_tokens": 70, "min_tokens": 1}
    asking = asyncio.create_task(kept_rig.post("/v1/completions", body))
    kept_rig.replicas[0].scheduler.stall(after=30)
    await calls.until(lambda: made(kept_rig) >= 70 + 30)
    asking.cancel()
    await until(kept_rig, "orphaned_batches", 1)
    await written(kept_rig)
    again = await restarted(start_rig, kept_rig)
    again.hurry()
    status, reply = await again.post("/v1/completions", body)
    assert (status, [len(one["token_ids"]) for one in reply["choices"]]) == (200, [70, 70])
    assert made(again) <= 140 + 4


def damage(ledger: Path) -> None:
    """Spoil the head of a batch."""
    [batch] = ledger.glob("batch-*")
    batch.write_bytes(batch.read_bytes()[9:])


async def test_a_batch_that_cannot_be_read_is_dropped(start_rig: StartRig, kept_rig: Rig) -> None:
    await left(kept_rig)
    await kept_rig.stop_gateway()
    ledger = str(kept_rig.config.gateway.ledger)
    damage(Path(ledger))
    again = await start_rig(2, replicas=kept_rig.replicas, gateway={"ledger": ledger})
    again.hurry()
    await whole(again)
    assert (await again.get("/status"))[1]["ledger"]["batches"] == 0
