"""Batches whose connection breaks run on, and an equal request adopts each once."""

import asyncio
import gc
import re
import weakref
from typing import Any

import aiohttp
import pytest

from gateway.dialects.replays import Batch
from tests.rigs import calls
from tests.rigs.rig import Json, Rig, StartRig

PROMPTS = [[5, 6, number + 7] for number in range(4)]
LENGTH = 24
BATCH: Json = {
    "prompt": PROMPTS,
    "n": 2,
    "max_tokens": LENGTH,
    "ignore_eos": True,
    "return_token_ids": True,
    "logprobs": 0,
}
ALL = 8 * LENGTH


async def until(rig: Rig, name: str, count: int, **labels: str) -> None:
    """Return when a counter of the gateway has this value."""
    shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
    line = re.compile(
        rf"^rollout_gateway_{name}_total{re.escape('{' + shown + '}' if shown else '')} ({count}\.0)$", re.M
    )

    async def page() -> str:
        async with rig.client.get(rig.url + "/metrics") as response:
            return await response.text()

    await calls.until(page, lambda text: bool(line.search(text)))


async def all_ended(rig: Rig) -> None:
    """Return when no engine has a sample any more."""
    await calls.until(lambda: not any(replica.scheduler.stalled for replica in rig.replicas))


def made(rig: Rig) -> int:
    return sum(replica.generated_tokens for replica in rig.replicas)


async def broken(rig: Rig, body: Json = BATCH, **kwargs: Any) -> None:
    """Send a batch, and break its connection while its samples have 6 tokens; the engines stand still from then on."""
    asking = asyncio.create_task(rig.post("/v1/completions", body, **kwargs))
    await rig.begun(samples=8)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def left(rig: Rig, body: Json = BATCH, **kwargs: Any) -> None:
    """As `broken`, once the gateway has noticed it."""
    await broken(rig, body, **kwargs)
    await until(rig, "orphaned_batches", 1)


async def whole(rig: Rig, body: Json = BATCH, **kwargs: Any) -> Json:
    status, reply = await rig.post("/v1/completions", body, **kwargs)
    assert status == 200, reply
    assert [len(choice["token_ids"]) for choice in reply["choices"]] == [LENGTH] * 8
    return reply


async def test_a_batch_that_has_ended_waits_for_its_replay(rig: Rig) -> None:
    await left(rig)
    rig.hurry()
    await calls.until(lambda: made(rig) >= ALL)
    await whole(rig)
    assert made(rig) == ALL


async def test_a_batch_is_free_as_soon_as_it_is_delivered(kept_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply may have hundreds of MiB, which the collector of cycles would find late."""
    batches, init = list[weakref.ref[Batch]](), Batch.__init__

    def noted(batch: Batch, *args: Any, **kwargs: Any) -> None:
        batches.append(weakref.ref(batch))
        init(batch, *args, **kwargs)

    monkeypatch.setattr(Batch, "__init__", noted)
    kept_rig.hurry()
    gc.disable()
    try:
        await whole(kept_rig)
        await calls.until(lambda: [batch() for batch in batches] == [None])
    finally:
        gc.enable()


async def test_a_batch_is_adopted_once(rig: Rig) -> None:
    await left(rig)
    asking = [asyncio.create_task(whole(rig)) for _ in range(3)]
    await until(rig, "orphaned_batch_ends", 1, end="adopted")
    rig.hurry()
    await asyncio.gather(*asking)
    await whole(rig)
    assert made(rig) == 4 * ALL


async def test_a_replay_whose_connection_breaks_too_leaves_the_batch_to_the_next(rig: Rig) -> None:
    await left(rig)
    asking = asyncio.create_task(whole(rig))
    await until(rig, "orphaned_batch_ends", 1, end="adopted")
    asking.cancel()
    await until(rig, "orphaned_batches", 2)
    rig.hurry()
    await whole(rig)
    assert made(rig) == ALL


async def test_equal_requests_whose_clients_are_there_never_share(rig: Rig) -> None:
    asking = [asyncio.create_task(whole(rig)) for _ in range(2)]
    await rig.begun(samples=16)
    rig.hurry()
    one, other = await asyncio.gather(*asking)
    assert made(rig) == 2 * ALL
    assert [choice["token_ids"] for choice in one["choices"]] != [choice["token_ids"] for choice in other["choices"]]


async def test_a_reply_that_breaks_off_is_adopted_whole(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client goes while the gateway writes, and the first blocks have left."""
    monkeypatch.setattr("gateway.http.json_body._SMALL_BYTES", 1)
    monkeypatch.setattr("gateway.http.json_body._BLOCK_BYTES", 64)
    write, blocks = aiohttp.web.StreamResponse.write, 0

    async def breaking(response: aiohttp.web.StreamResponse, data: Any) -> None:
        nonlocal blocks
        blocks += 1
        if blocks == 3:
            rig.break_connections()
        await write(response, data)

    monkeypatch.setattr(aiohttp.web.StreamResponse, "write", breaking)
    rig.hurry()
    with pytest.raises(aiohttp.ClientError):
        await rig.post("/v1/completions", BATCH)
    await until(rig, "orphaned_batches", 1)
    await whole(rig)
    assert made(rig) == ALL


@pytest.mark.parametrize("change", [{"max_tokens": LENGTH + 1}, {"prompt": PROMPTS[::-1]}, {"user": "b"}])
async def test_another_request_adopts_nothing(rig: Rig, change: Json) -> None:
    await left(rig)
    asking = asyncio.create_task(rig.post("/v1/completions", BATCH | change))
    await rig.begun(samples=16)
    rig.hurry()
    assert (await asking)[0] == 200
    assert made(rig) >= 2 * ALL


async def test_another_key_adopts_nothing(start_rig: StartRig) -> None:
    rig = await start_rig(2, gateway={"inference_keys": ["a", "b"], "admin_keys": ["c"], "trusted_networks": []})
    await broken(rig, headers={"Authorization": "Bearer a"})
    other = asyncio.create_task(whole(rig, headers={"Authorization": "Bearer b"}))
    await rig.begun(samples=16)
    mine = asyncio.create_task(whole(rig, headers={"Authorization": "Bearer a"}))
    rig.hurry()
    await asyncio.gather(other, mine)
    assert made(rig) == 2 * ALL


@pytest.mark.parametrize(
    ("alone", "headers"),
    [({"prompt": PROMPTS[0], "n": 1}, {}), ({"stream": True}, {}), ({}, {"X-Request-Id": "one"})],
    ids=["a single sample", "a stream", "a request with an id"],
)
async def test_what_is_no_blind_replay_ends_with_its_connection(rig: Rig, alone: Json, headers: dict[str, str]) -> None:
    asking = asyncio.create_task(rig.post("/v1/completions", BATCH | alone, headers=headers))
    await rig.begun(samples=1)
    asking.cancel()
    await all_ended(rig)


@pytest.mark.parametrize("grace_s", [0, 0.1])
async def test_a_batch_ends_after_its_grace(start_rig: StartRig, grace_s: float) -> None:
    rig = await start_rig(2, gateway={"replay_grace_s": grace_s})
    await broken(rig)
    await all_ended(rig)
    if grace_s:
        await until(rig, "orphaned_batch_ends", 1, end="expired")
    rig.hurry()
    before = made(rig)
    await whole(rig)
    assert made(rig) - before == ALL


async def test_a_pause_that_aborts_ends_it(rig: Rig) -> None:
    await left(rig)
    assert (await rig.post("/pause?mode=abort"))[0] == 200
    await until(rig, "orphaned_batch_ends", 1, end="failed")
    assert (await rig.post("/resume"))[0] == 200
    rig.hurry()
    await whole(rig)


@pytest.mark.parametrize(("demand", "shares"), [({"max_staleness": 0}, False), ({"max_staleness": 1}, True)])
async def test_a_replay_is_not_given_staler_tokens_than_it_takes(rig: Rig, demand: Json, shares: bool) -> None:
    await rig.open_group()
    await left(rig, BATCH | demand)
    await rig.update()
    asking = asyncio.create_task(whole(rig, BATCH | demand))
    await until(rig, "orphaned_batch_ends", 1, end="adopted" if shares else "stale")
    rig.hurry()
    reply = await asking
    versions = {span["version"] for choice in reply["choices"] for span in choice["weight_versions"]}
    assert versions == ({0, 1} if shares else {1})


async def test_a_gateway_that_ends_ends_its_orphans(start_rig: StartRig) -> None:
    rig = await start_rig(2)
    await left(rig)
    await rig.stop_gateway()
    await all_ended(rig)
