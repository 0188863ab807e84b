"""Limits of keys: by the clock, and through a gateway."""

import asyncio

import pytest

from engines.errors import TooManyRequests
from gateway.config.schema import KeyLimits
from gateway.http.guard.limits import Allowance
from tests.rigs.rig import Json, Rig, StartRig

KEYS = {"inference_keys": ["first", "second"], "admin_keys": ["owner"], "trusted_networks": []}
LONG: Json = {"max_tokens": 200, "ignore_eos": True}
PROMPT = {"prompt": [3], "max_tokens": 8, "ignore_eos": True}


def as_(key: str) -> Json:
    return {"headers": {"Authorization": f"Bearer {key}"}}


async def complete_as(rig: Rig, key: str) -> tuple[int, str | None, Json]:
    async with rig.client.post(rig.url + "/v1/completions", json=PROMPT, **as_(key)) as response:
        return response.status, response.headers.get("Retry-After"), await response.json()


def test_requests_of_a_minute_refill_evenly() -> None:
    now = 0.0
    refused_by: list[str] = []
    allowance = Allowance(KeyLimits(requests_per_minute=2), refused_by.append, lambda: now)
    for _ in range(2):
        with allowance.used():
            pass
    with pytest.raises(TooManyRequests, match="2 requests per minute") as refused, allowance.used():
        pass
    assert refused.value.retry_after_s == 30
    now = 30.0
    with allowance.used():
        pass
    now = 1000.0
    for _ in range(2):
        with allowance.used():
            pass
    with pytest.raises(TooManyRequests), allowance.used():
        pass
    assert refused_by == ["requests_per_minute"] * 2


def test_tokens_are_counted_after_the_request_and_hold_up_the_next() -> None:
    now = 0.0
    allowance = Allowance(KeyLimits(tokens_per_minute=60), lambda limit: None, lambda: now)
    with allowance.used():
        allowance.charge(90)
    with pytest.raises(TooManyRequests, match="60 tokens per minute") as refused, allowance.used():
        pass
    assert refused.value.retry_after_s == 31
    now = 31.0
    with allowance.used():
        pass


async def test_a_key_over_its_limit_gets_429_and_other_keys_go_on(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway=KEYS | {"key_limits": {"requests_per_minute": 1}})
    assert (await complete_as(rig, "first"))[0] == 200
    status, retry_after, body = await complete_as(rig, "first")
    assert status == 429
    assert 1 <= int(retry_after or 0) <= 60
    assert body["error"]["code"] == 429
    assert "gateway.key_limits.requests_per_minute" in body["error"]["message"]
    assert (await complete_as(rig, "second"))[0] == 200
    for _ in range(3):
        assert (await complete_as(rig, "owner"))[0] == 200
    assert (await rig.get("/status", **as_("first")))[0] == 200, "only POST requests count"


async def test_metrics_count_refusals_by_the_name_of_the_key_and_the_limit(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway=KEYS | {"key_limits": {"requests_per_minute": 1}})
    assert [(await complete_as(rig, "second"))[0] for _ in range(3)] == [200, 429, 429]
    async with rig.client.get(rig.url + "/metrics", **as_("owner")) as response:
        page = await response.text()
    assert (
        'rollout_gateway_limited_requests_total{key="gateway.inference_keys[1]",limit="requests_per_minute"} 2.0\n'
        in page
    )
    assert "second" not in page.replace("_seconds", "")


async def test_tokens_of_whole_replies_and_streams_count(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway=KEYS | {"key_limits": {"tokens_per_minute": 9}})
    assert (await complete_as(rig, "first"))[0] == 200
    assert (await complete_as(rig, "first"))[0] == 429
    stream = PROMPT | {"stream": True}
    async with rig.client.post(rig.url + "/v1/completions", json=stream, **as_("second")) as response:
        assert (await response.read()).endswith(b"[DONE]\n\n")
    assert (await complete_as(rig, "second"))[0] == 429


@pytest.mark.parametrize(
    ("path", "body", "charged"),
    [
        ("/v1/completions", LONG | {"prompt": [5, 6, 7]}, 3 + 6),
        ("/v1/completions", LONG | {"prompt": [[5, 6, 7], [8]]}, 3 + 1 + 2 * 6),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": LONG}, 3 + 6),
        ("/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}, 3 + 6),
    ],
    ids=["one prompt", "batch", "token ids", "sglang"],
)
async def test_tokens_of_a_whole_reply_are_charged_though_its_client_leaves(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, path: str, body: Json, charged: int
) -> None:
    found: list[int] = []
    monkeypatch.setattr(Allowance, "charge", lambda self, tokens: found.append(tokens))
    limits = {"key_limits": {"tokens_per_minute": 1_000_000}, "replay_grace_s": 0.5}
    rig = await start_rig(1, gateway=KEYS | limits)
    asking = asyncio.create_task(rig.post(path, body, **as_("first")))
    await rig.begun(samples=2 if charged > 9 else 1)
    asking.cancel()
    async with asyncio.timeout(20):
        while not sum(found):
            await asyncio.sleep(0.01)
    assert sum(found) == charged


async def test_the_prompt_of_a_group_in_parts_is_charged_once_though_its_client_leaves(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(Allowance, "charge", lambda self, tokens: found.append(tokens))
    limits = {"key_limits": {"tokens_per_minute": 1_000_000}, "replay_grace_s": 0.5, "samples_together": 1}
    rig = await start_rig(1, gateway=KEYS | limits)
    asking = asyncio.create_task(rig.post("/v1/completions", LONG | {"prompt": [5, 6, 7], "n": 4}, **as_("first")))
    await rig.begun(samples=4)
    asking.cancel()
    async with asyncio.timeout(20):
        while not sum(found):
            await asyncio.sleep(0.01)
    assert sum(found) == 3 + 4 * 6


async def test_a_batch_that_a_replay_adopts_is_charged_once(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(Allowance, "charge", lambda self, tokens: found.append(tokens))
    rig = await start_rig(1, gateway=KEYS | {"key_limits": {"tokens_per_minute": 1_000_000}})
    body = LONG | {"prompt": [[5, 6, 7], [8]]}
    asking = asyncio.create_task(rig.post("/v1/completions", body, **as_("first")))
    await rig.begun(samples=2)
    asking.cancel()
    async with asyncio.timeout(20):
        while not (await rig.get("/status", **as_("owner")))[1]["ledger"]["orphaned_batches"]:
            await asyncio.sleep(0.01)
        rig.hurry()
        status, reply = await rig.post("/v1/completions", body, **as_("first"))
    assert (status, sum(found)) == (200, reply["usage"]["total_tokens"])


async def test_requests_at_once_are_counted_while_they_run(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway=KEYS | {"key_limits": {"requests_at_once": 1}}, sim={"mean_tokens": 100_000})
    running = asyncio.create_task(
        rig.post("/v1/completions", PROMPT | {"max_tokens": 64}, **as_("first")),
    )
    await rig.begun()
    assert (await complete_as(rig, "first"))[0] == 429
    rig.hurry()
    assert (await running)[0] == 200
    assert (await complete_as(rig, "first"))[0] == 200


async def test_without_limits_none_apply(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway=KEYS)
    assert {(await complete_as(rig, "first"))[0] for _ in range(5)} == {200}


async def test_a_client_that_is_trusted_without_a_key_has_no_limits(start_rig: StartRig) -> None:
    rig = await start_rig(
        1, gateway=KEYS | {"key_limits": {"requests_per_minute": 1}, "trusted_networks": ["127.0.0.0/8"]}
    )
    assert {(await complete_as(rig, "first"))[0] for _ in range(3)} == {200}
