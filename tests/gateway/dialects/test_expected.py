"""Batches begin with their longest prompts, by the lengths of the epoch before."""

from typing import Any

from tests.rigs.rig import Rig, StartRig


async def _prompts_in_order_of_placement(rig: Rig, body: dict[str, Any]) -> list[int]:
    """The places of prompts in the request, by the time at which a replica took them."""
    status, reply = await rig.post("/v1/completions", body, headers={"X-Request-Id": "mine"})
    assert status == 200, reply
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(body["prompt"])))
    _, found = await rig.get("/traces/mine")
    return [int(life["rollout"].removeprefix("mine-")) for life in found["rollouts"]]


async def test_the_lengths_of_the_last_epoch_order_the_next(start_rig: StartRig) -> None:
    rig = await start_rig(1)
    for prompt, tokens in ((3, 2), (4, 6), (5, 4)):
        await rig.post("/v1/completions", {"prompt": [prompt], "max_tokens": tokens, "ignore_eos": True})
    assert await _prompts_in_order_of_placement(rig, {"prompt": [[3], [4], [5], [6]], "max_tokens": 4}) == [3, 1, 2, 0]


async def test_lengths_are_learned_of_streams_and_of_groups(start_rig: StartRig) -> None:
    rig = await start_rig(1)
    await rig.stream("/v1/completions", {"prompt": [3], "max_tokens": 5, "ignore_eos": True})
    await rig.post("/v1/completions", {"prompt": [4], "n": 2, "max_tokens": 7, "ignore_eos": True})
    await rig.post("/v1/completions", {"prompt": [5], "max_tokens": 6, "ignore_eos": True})
    assert await _prompts_in_order_of_placement(rig, {"prompt": [[3], [4], [5]], "max_tokens": 1}) == [1, 2, 0]
