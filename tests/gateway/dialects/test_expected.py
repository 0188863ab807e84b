"""`expected_tokens` in requests, and batches that begin with their longest prompts."""

from typing import Any

import pytest

from engines.errors import InvalidRequest
from gateway.dialects.own_fields import read_expected, without_own_fields
from tests.rigs.rig import Rig, StartRig


@pytest.mark.parametrize(
    ("body", "read"),
    [
        ({}, [None, None]),
        ({"expected_tokens": 9}, [9, 9]),
        ({"expected_tokens": [9, None]}, [9, None]),
        ({"vllm_xargs": {"expected_tokens": 9}}, [9, 9]),
    ],
)
def test_an_estimate_is_for_all_prompts_or_for_each(body: dict[str, Any], read: list[int | None]) -> None:
    assert list(read_expected(body, 2)) == read


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "9", [9], [9, "x"], [9, 9, 9], {}])
def test_a_malformed_estimate_is_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected_tokens"):
        read_expected({"expected_tokens": given}, 2)


def test_engines_do_not_get_the_gateways_own_fields() -> None:
    body = {"prompt": "a", "expected_tokens": 9, "min_version": 1, "vllm_xargs": {"expected_tokens": 9}}
    assert without_own_fields(body) == {"prompt": "a", "vllm_xargs": None}
    assert without_own_fields({"vllm_xargs": {"x": 1, "expected_tokens": 9}}) == {"vllm_xargs": {"x": 1}}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate"])
async def test_every_dialect_takes_an_estimate_and_refuses_a_malformed_one(rig: Rig, route: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": [3], "max_tokens": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        "/inference/v1/generate": {"token_ids": [3], "sampling_params": {"max_tokens": 2}},
        "/generate": {"input_ids": [3], "sampling_params": {"max_new_tokens": 2}},
    }
    body = bodies[route]
    assert (await rig.post(route, body | {"expected_tokens": 9}))[0] == 200
    status, reply = await rig.post(route, body | {"expected_tokens": -9})
    assert status == 400
    assert "expected_tokens" in str(reply)


async def _prompts_in_order_of_placement(rig: Rig, body: dict[str, Any]) -> list[int]:
    """The places of prompts in the request, by the time at which a replica took them."""
    status, reply = await rig.post("/v1/completions", body, headers={"X-Request-Id": "mine"})
    assert status == 200, reply
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(body["prompt"])))
    _, found = await rig.get("/traces/mine")
    return [int(life["rollout"].removeprefix("mine-")) for life in found["rollouts"]]


async def test_a_batch_begins_with_its_longest_prompts(start_rig: StartRig) -> None:
    rig = await start_rig(1)
    body = {"prompt": [[3], [4], [5]], "max_tokens": 4, "expected_tokens": [10, 30, 20]}
    assert await _prompts_in_order_of_placement(rig, body) == [1, 2, 0]


async def test_the_lengths_of_the_last_epoch_order_the_next(start_rig: StartRig) -> None:
    rig = await start_rig(1)
    for prompt, tokens in ((3, 2), (4, 6), (5, 4)):
        await rig.post("/v1/completions", {"prompt": [prompt], "max_tokens": tokens, "ignore_eos": True})
    assert await _prompts_in_order_of_placement(rig, {"prompt": [[3], [4], [5], [6]], "max_tokens": 4}) == [3, 1, 2, 0]


async def test_lengths_and_contexts_are_learned_of_streams_and_submissions(start_rig: StartRig) -> None:
    rig = await start_rig(1)
    body = {"prompt": [3], "max_tokens": 5, "ignore_eos": True, "stream": True}
    async with rig.client.post(f"{rig.url}/v1/completions", json=body) as reply:
        await reply.read()
    groups = [{"prompt": [4], "n": 2}]
    submitted = {"groups": groups, "sampling": {"max_tokens": 7, "ignore_eos": True}}
    async with rig.client.post(f"{rig.url}/v1/rollouts", json=submitted) as reply:
        await reply.read()
    await rig.post("/v1/completions", {"prompt": [5], "max_tokens": 6, "ignore_eos": True})
    assert await _prompts_in_order_of_placement(rig, {"prompt": [[3], [4], [5]], "max_tokens": 1}) == [1, 2, 0]
