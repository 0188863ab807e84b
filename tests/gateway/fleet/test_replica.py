"""Which weights wrote the KV under a completion: of flights alone, and of completions in every dialect."""

import asyncio
import json
from typing import Any

import pytest

from gateway.fleet.replica import Flight
from tests.rigs.rig import Rig, StartRig

Json = dict[str, Any]

LONG = {"max_tokens": 60, "ignore_eos": True}
BODIES: dict[str, Json] = {
    "/v1/completions": {"prompt": [5, 6], **LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], **LONG},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": LONG},
}


MEETS = {
    "no update": (4, [], 4, [4], [4]),
    "updates that keep its KV": (4, [(5, True), (7, True)], 7, [4, 5, 7], [4, 5, 7]),
    "one after which it is made again": (4, [(5, True), (6, False)], 6, [6], [4, 5, 6]),
    "one that keeps it after its end": (4, [(5, True)], 4, [4], [4, 5]),
    "one that clears it after its end": (4, [(5, False)], 4, [4], [4, 5]),
    "the update under which it was sent": (None, [(1, True)], 1, [1], [1]),
    "updates of an engine that tells no spans": (4, [(5, True), (7, True)], None, [4, 5, 7], [4, 5, 7]),
}


@pytest.mark.parametrize(("sent", "updates", "last", "kv", "tokens"), MEETS.values(), ids=MEETS.keys())
def test_a_request_that_meets_it_has_kv_and_tokens_of_these_versions(
    sent: int | None, updates: list[tuple[int, bool]], last: int | None, kv: list[int], tokens: list[int]
) -> None:
    flight = Flight(sent)
    for version, keeps_kv in updates:
        flight.meet(version, keeps_kv=keeps_kv)
    assert flight.kv_versions([{"version": last, "start": 0, "end": 3}] if last else []) == kv
    assert flight.versions == tokens


def told(choice: Json) -> list[int]:
    """Return the versions in a choice."""
    return list(choice["kv_versions"])


async def asked(rig: Rig, path: str, *, stream: bool = False) -> Json:
    """The one choice of the reply, or the last chunk's."""
    if not stream:
        status, reply = await rig.post(path, BODIES[path])
        assert status == 200, reply
        return reply["choices"][0]
    async with rig.client.post(rig.url + path, json=BODIES[path] | {"stream": True}) as response:
        events = [event.removeprefix("data: ") for event in (await response.text()).split("\n\n")]
    last = [json.loads(event) for event in events if event.startswith("{")][-1]
    return last["choices"][0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("in_flight", "kv_versions"), [("keep", [0, 1]), ("recompute", [1])])
async def test_every_dialect_says_whether_an_update_left_older_kv_under_a_completion(
    start_rig: StartRig, in_flight: str, kv_versions: list[int], stream: bool
) -> None:
    rig = await start_rig(sim={"decode_step_s": 0.02}, weights={"in_flight": in_flight})
    await rig.open_group()
    running = [asyncio.create_task(asked(rig, path, stream=stream)) for path in BODIES]
    await rig.begun(len(BODIES))
    await rig.update()
    assert not any(task.done() for task in running)
    rig.hurry()
    assert [told(await task) for task in running] == [kv_versions] * len(BODIES)
    assert told(await asked(rig, "/v1/completions", stream=stream)) == [1], "what is begun after it is of one version"
    (record,) = (await rig.get("/v1/weight_updates"))[1]["weight_updates"]
    assert (record["in_flight"], 0 < record["stopped_s"] < record["age_s"]) == (in_flight, True)


async def test_a_rollout_frozen_between_prompt_and_first_token_has_kv_of_both_versions(
    start_rig: StartRig,
) -> None:
    rig = await start_rig(1, weights={"canary": {"enabled": False}})  # which would stall as the rollout does
    await rig.open_group()
    running = asyncio.create_task(rig.complete([5], max_tokens=2, ignore_eos=True))
    await rig.begun(tokens=0)
    await rig.update()
    rig.hurry()
    choice = (await running)["choices"][0]
    assert choice["weight_versions"] == [{"version": 1, "start": 0, "end": 2}]
    assert choice["kv_versions"] == [0, 1]


@pytest.mark.parametrize(("clear_cache", "kv_versions"), [("false", [0, 1]), ("true", [1])])
async def test_what_a_trainers_own_pause_keeps_counts_as_what_an_update_keeps(
    start_rig: StartRig, clear_cache: str, kv_versions: list[int]
) -> None:
    rig = await start_rig(sim={"decode_step_s": 0.02}, weights={"in_flight": "drain"})
    await rig.open_group()
    running = asyncio.create_task(asked(rig, "/v1/completions"))
    await rig.begun()
    await rig.post(f"/pause?mode=keep&clear_cache={clear_cache}")
    await rig.update()
    rig.hurry()
    await rig.post("/resume")
    assert told(await running) == kv_versions
