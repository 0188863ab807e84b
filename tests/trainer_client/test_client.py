"""The client against a gateway over simulated engines, and against servers that fail in ways a gateway may."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from engines.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    GatewayUnreachable,
    InvalidRequest,
    NotAllowed,
    RolloutGatewayError,
)
from engines.process.port import free_port
from gateway.api import error_body
from tests.rigs.calls import until
from tests.rigs.rig import MAX_MODEL_LEN, Rig, StartRig
from trainer_client import Rollout, RolloutClient, SamplingParams, WeightSpan
from trainer_client.client import KEY_VARIABLE, URL_VARIABLE

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
SOON_S = 30.0
SLOW = {"decode_step_s": 0.05}
TOKENS = SamplingParams(n=2, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(n=2, max_tokens=100, ignore_eos=True)

Answer = Callable[[int], Awaitable[web.Response | None]]


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(rig.url) as client:
        yield client


async def in_flight(rig: Rig) -> int:
    _, status = await rig.get("/status")
    return sum(replica["samples_in_flight"] for replica in status["replicas"]) + int(status["queue_length"])


async def until_in_flight(rig: Rig, expected: Callable[[int], bool]) -> None:
    await until(lambda: in_flight(rig), expected)


# Results


async def test_rollouts_come_in_the_order_of_their_prompts_with_aligned_arrays(client: RolloutClient) -> None:
    prompts = ["two words", np.array([5, 6, 7]), (8, 9)]
    rollouts = await client.generate(prompts, TOKENS).gather()
    assert [rollout.prompt_index for rollout in rollouts] == [0, 1, 2]
    for rollout, prompt in zip(rollouts, prompts, strict=True):
        assert rollout.prompt_token_ids is not None
        assert rollout.prompt_token_ids.dtype == np.int32
        assert isinstance(prompt, str) or rollout.prompt_token_ids.tolist() == list(prompt)
        assert [completion.sample_index for completion in rollout.completions] == [0, 1]
        for completion in rollout.completions:
            assert completion.logprobs is not None
            assert completion.token_ids.dtype == np.int32
            assert completion.logprobs.dtype == np.float32
            assert len(completion.token_ids) == len(completion.logprobs) == 8
            assert np.all(completion.logprobs <= 0)
            assert completion.finish_reason == "length"
            assert completion.spans == (WeightSpan(0, 0, 8),)
            assert completion.oldest_version == 0


async def test_a_prompt_waits_for_the_weights_that_it_asks_for(rig: Rig, client: RolloutClient) -> None:
    await rig.open_group()
    batch = client.generate(PROMPTS[:1], TOKENS, min_version=1)
    await asyncio.sleep(0.1)
    assert not batch.is_done
    await rig.update()
    (rollout,) = await batch.gather()
    assert rollout.completions[0].oldest_version == 1
    with pytest.raises(InvalidRequest, match="max_staleness = -1"):
        await client.generate(PROMPTS[:1], TOKENS, max_staleness=-1).gather()


# As they end


async def test_every_completion_is_told_once_whoever_asks(client: RolloutClient) -> None:
    batch = client.generate(PROMPTS * 20, TOKENS)
    seen = Counter([(completion.prompt_index, completion.sample_index) async for completion in batch])
    assert seen == {(prompt, sample): 1 for prompt in range(60) for sample in range(2)}
    assert [rollout.prompt_index for rollout in await batch.gather()] == list(range(60))


async def test_no_more_prompts_are_asked_for_than_max_in_flight(start_rig: StartRig) -> None:
    rig = await start_rig(sim={"decode_step_s": 0.01})
    most = 0
    async with RolloutClient(rig.url, max_in_flight=2) as client:
        batch = client.generate(PROMPTS * 4, TOKENS)
        while not batch.is_done:
            most = max(most, await in_flight(rig))
        assert most == 2 * TOKENS.n


# Cancelling


async def test_who_stops_iterating_cancels_what_runs(start_rig: StartRig) -> None:
    rig = await start_rig(sim=SLOW)
    async with RolloutClient(rig.url) as client:
        batch = client.generate([*PROMPTS, []], LONG, failures="keep")
        async for rollout in batch.rollouts():
            assert rollout.prompt_index == 3
            break
        await until_in_flight(rig, lambda samples: samples == 0)
        async with asyncio.timeout(SOON_S):
            assert [rollout.prompt_index for rollout in await batch.gather()] == [3]


async def test_closing_the_client_cancels_its_batches(start_rig: StartRig) -> None:
    rig = await start_rig(sim=SLOW)
    async with RolloutClient(rig.url) as client:
        client.generate(PROMPTS, LONG)
        await until_in_flight(rig, lambda samples: samples == 6)
    await until_in_flight(rig, lambda samples: samples == 0)


# Errors


async def test_a_refused_prompt_is_named_by_its_place_in_the_batch(client: RolloutClient) -> None:
    too_long = [5] * MAX_MODEL_LEN
    with pytest.raises(InvalidRequest, match=r"^prompt\[1\] has 128 tokens.*max_model_len") as refused:
        await client.generate([PROMPTS[0], too_long], TOKENS).gather()
    assert refused.value.param == "prompt"


async def test_kept_failures_stand_beside_what_was_delivered(client: RolloutClient) -> None:
    batch = client.generate([PROMPTS[0], [], PROMPTS[1]], TOKENS, failures="keep")
    rollouts = await batch.gather()
    assert [len(rollout.completions) for rollout in rollouts] == [2, 0, 2]
    assert isinstance(rollouts[1].error, InvalidRequest)
    assert "prompt[1] is empty" in str(rollouts[1].error)


async def test_keys_open_what_they_open(start_rig: StartRig) -> None:
    rig = await start_rig(gateway={"inference_keys": ["generate"], "admin_keys": ["all"], "trusted_networks": []})
    async with RolloutClient(rig.url) as client:
        with pytest.raises(NotAllowed) as unknown:
            await client.generate(PROMPTS, TOKENS).gather()
        assert not unknown.value.known
    async with RolloutClient(rig.url, api_key="generate") as client:
        assert len(await client.generate(PROMPTS, TOKENS).gather()) == 3
        with pytest.raises(NotAllowed) as known:
            await client.call("POST", "/start_weight_update", {})
        assert known.value.known
    async with RolloutClient(rig.url, api_key="all") as client:
        assert await client.call("GET", "/get_world_size") == {"world_size": 2}


async def test_url_and_key_may_stand_in_the_environment(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="give url, or set ROLLOUT_URL"):
        RolloutClient()
    monkeypatch.setenv(URL_VARIABLE, f"{rig.url}/")
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    async with RolloutClient() as client:
        assert client.url == rig.url
        assert len(await client.generate(PROMPTS, TOKENS).gather()) == 3


@pytest.mark.parametrize("url", ["http://me:s3cret@127.0.0.1:9", "me:s3cret@127.0.0.1:9", "http://me:s3c/ret@there"])
def test_a_url_with_a_password_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"url.* give the key as api_key, or set ROLLOUT_API_KEY") as refused:
        RolloutClient(url, api_key="key")
    assert "s3c" not in str(refused.value)


async def test_a_closed_client_says_that_it_is(rig: Rig) -> None:
    client = RolloutClient(rig.url)
    await client.status()
    await client.close()
    for call in (client.status, client.wait_ready, client.generate(PROMPTS).gather):
        with pytest.raises(InvalidRequest, match="the client is closed"):
            await call()


async def test_a_call_without_an_answer_ends_in_time_or_with_its_client() -> None:
    async def silence(_: int) -> None:
        await asyncio.Event().wait()

    async with Played(silence) as gateway:
        client = RolloutClient(gateway.url)
        with pytest.raises(DeadlineExceeded, match=r"no answer to /start_weight_update within 0\.2 s"):
            await client.call("POST", "/start_weight_update", {}, 0.2)
        calling = asyncio.ensure_future(client.weight_version())
        while len(gateway.request_ids) < 2:
            await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(InvalidRequest, match="the client is closed"):
            await asyncio.wait_for(calling, SOON_S)


async def test_what_json_cannot_hold_is_told_with_its_prompt(client: RolloutClient) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt\[1\].*JSON"):
        await client.generate(["good", "half an emoji: \ud83d"], TOKENS).gather()


def test_a_number_of_samples_in_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="n = '2' is text"):
        SamplingParams(n="2")  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", ["one string", [], [[[1, 2]]], [3], [[1.5]], [None], {"input_ids": [[5]]}, 5])
async def test_prompts_of_a_wrong_form_are_refused_before_anything_is_sent(client: RolloutClient, prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompts") as refused:
        client.generate(prompts, TOKENS)
    assert refused.value.param == "prompts"


async def test_a_wait_that_runs_out_says_which_and_how_long(start_rig: StartRig) -> None:
    rig = await start_rig(sim=SLOW)
    async with RolloutClient(rig.url) as client:
        with pytest.raises(DeadlineExceeded, match=r"prompt\[0\]: no completions within timeout_s = 0.3"):
            await client.generate(PROMPTS[:1], LONG, timeout_s=0.3).gather()
    await until_in_flight(rig, lambda samples: samples == 0)


# Ready


async def test_a_gateway_that_does_not_exist_is_waited_for_and_named() -> None:
    async with RolloutClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(DeadlineExceeded, match=r"not ready after 0\.2 s: .*is unreachable"):
            await client.wait_ready(timeout_s=0.2)


# Trying again


class Played:
    """A gateway that answers as told, by the number of the call."""

    def __init__(self, answer: Answer) -> None:
        self.request_ids: list[str] = []
        self._answer = answer
        app = web.Application()
        app.router.add_route("*", "/{path:.+}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def __aenter__(self) -> "Played":
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        self.request_ids.append(request.headers.get("X-Request-Id", ""))
        call = len(self.request_ids)
        if (response := await self._answer(call)) is not None:
            return response
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_client.retries.FIRST_PAUSE_S", 0.01)


def whole() -> web.Response:
    choices = [{"index": i, "token_ids": [7], "text": "7", "finish_reason": "stop"} for i in range(TOKENS.n)]
    return web.json_response({"choices": choices})


async def rollout_of(url: str, **options: Any) -> Rollout:
    async with RolloutClient(url, **options) as client:
        (rollout,) = await client.generate(PROMPTS[:1], TOKENS).gather()
        return rollout


def answered(status: int | None) -> web.Response | None:
    """A reply with an error, or none where the connection breaks."""
    kind = "EngineFailed" if status == 502 else ""
    return web.json_response(error_body("died", status, kind=kind), status=status) if status else None


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("status", "times"), [(502, 1), (503, 6), (504, 1), (None, 1)])
async def test_a_prompt_is_asked_for_again_under_the_same_id(status: int | None, times: int) -> None:
    """A gateway that is away is tried for longer than the number of attempts."""

    async def late(call: int) -> web.Response | None:
        return whole() if call > times else answered(status)

    async with Played(late) as gateway:
        rollout = await rollout_of(gateway.url)
    assert len(rollout.completions) == TOKENS.n
    assert (len(gateway.request_ids), len({*gateway.request_ids})) == (times + 1, 1)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("status", "attempts", "asked"),
    [(502, 3, 3), *((status, 4, 1) for status in (400, 401, 404, 409, 413, 424, 500))],
)
async def test_the_last_attempt_tells_its_error_and_what_would_be_the_same_again_is_asked_once(
    status: int, attempts: int, asked: int
) -> None:
    async def never(call: int) -> web.Response | None:
        return answered(status)

    async with Played(never) as gateway:
        with pytest.raises(RolloutGatewayError, match="died") as raised:
            await rollout_of(gateway.url, attempts=attempts)
    assert len(gateway.request_ids) == asked
    assert status != 502 or str(raised.value) == "prompt[0]: died (after 3 attempts)"


def over_the_limit(retry_after: str) -> web.Response:
    body = error_body("this key has used its 60 requests per minute", 429, kind="TooManyRequests")
    return web.json_response(body, status=429, headers={"Retry-After": retry_after})


@pytest.mark.usefixtures("quick")
async def test_a_call_over_a_limit_waits_as_long_as_the_reply_says() -> None:
    came: list[float] = []

    async def second_time(call: int) -> web.Response:
        came.append(time.monotonic())
        return whole() if call > 1 else over_the_limit("1")

    async with Played(second_time) as gateway:
        await rollout_of(gateway.url)
    assert came[1] - came[0] >= 1.0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("choices", [[], [{"index": 0, "token_ids": [7], "finish_reason": "stop"}]])
async def test_a_reply_without_all_samples_is_not_delivered(choices: list[Any]) -> None:
    async def short(call: int) -> web.Response:
        return web.json_response({"choices": choices})

    async with Played(short) as gateway:
        with pytest.raises(EngineError, match=f"2 completions were requested, but the reply has {len(choices)}"):
            await rollout_of(gateway.url, attempts=2)
    assert len(gateway.request_ids) == 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("status", [503, None], ids=["503", "the connection breaks"])
async def test_a_weight_call_that_may_have_arrived_is_made_once(status: int | None) -> None:
    async def answer(call: int) -> Any:
        return web.json_response({}, status=status) if status else None

    async with Played(answer) as gateway, RolloutClient(gateway.url) as client:
        with pytest.raises(GatewayUnreachable):
            await client.call("POST", "/start_weight_update", {})
    assert len(gateway.request_ids) == 1


async def test_a_redirect_is_refused_with_its_place_and_not_taken_for_an_answer() -> None:
    async def elsewhere(call: int) -> web.Response:
        return web.json_response({}, status=302, headers={"Location": "https://there/login"})

    async with Played(elsewhere) as gateway, RolloutClient(gateway.url) as client:
        for call in (client.status, client.generate(PROMPTS).gather):
            with pytest.raises(ConfigError, match="redirects to https://there/login"):
                await call()
