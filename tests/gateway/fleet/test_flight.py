"""Which weights wrote the KV under a completion: of flights alone, and of completions in every dialect."""

import asyncio
import json
from typing import Any

import pytest

from gateway.fleet.flight import Flight
from tests.rigs.rig import Rig, StartRig

Json = dict[str, Any]

LONG = {"max_tokens": 60, "ignore_eos": True}
BODIES: dict[str, Json] = {
    "/v1/completions": {"prompt": [5, 6], **LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], **LONG},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": LONG},
    "/generate": {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}},
}


def ended(version: int | None) -> Json:
    return {"weight_versions": [{"version": version, "start": 0, "end": None if version is None else 3}]}


def test_a_request_that_meets_no_update_has_kv_of_one_version() -> None:
    assert Flight(4).kv_versions(ended(4)) == [4]


def test_each_update_that_keeps_its_kv_adds_a_version() -> None:
    flight = Flight(4)
    flight.meet(5, keeps_kv=True)
    flight.meet(7, keeps_kv=True)
    assert flight.kv_versions(ended(7)) == [4, 5, 7]
    assert flight.kv_versions({}) == [4, 5, 7], "an engine that tells no spans"


def test_an_update_that_has_it_made_again_leaves_its_own_alone() -> None:
    flight = Flight(4)
    flight.meet(5, keeps_kv=True)
    flight.meet(6, keeps_kv=False)
    assert flight.kv_versions(ended(6)) == [6]


def test_a_sample_that_ended_before_the_update_has_none_of_the_new_version() -> None:
    kept, cleared = Flight(4), Flight(4)
    kept.meet(5, keeps_kv=True)
    cleared.meet(5, keeps_kv=False)
    assert kept.kv_versions(ended(4)) == cleared.kv_versions(ended(4)) == [4]


def test_one_that_is_sent_under_an_update_has_what_the_update_brings() -> None:
    flight = Flight(None)
    flight.meet(1, keeps_kv=True)
    assert flight.kv_versions(ended(1)) == [1]
    assert flight.versions == [1]


def test_its_tokens_may_be_of_every_version_that_it_has_met_also_where_its_kv_is_not() -> None:
    flight = Flight(4)
    flight.meet(5, keeps_kv=True)
    flight.meet(6, keeps_kv=False)
    assert flight.versions == [4, 5, 6]


def told(choice: Json) -> list[int]:
    """Return the versions in a choice of vLLM's dialect, or in a sample of SGLang's."""
    return list(choice.get("meta_info", choice)["kv_versions"])


async def asked(rig: Rig, path: str, *, stream: bool = False) -> Json:
    """The one choice of the reply, or the last chunk's."""
    if not stream:
        status, reply = await rig.post(path, BODIES[path])
        assert status == 200, reply
        return reply["choices"][0] if "choices" in reply else reply
    async with rig.client.post(rig.url + path, json=BODIES[path] | {"stream": True}) as response:
        events = [event.removeprefix("data: ") for event in (await response.text()).split("\n\n")]
    last = [json.loads(event) for event in events if event.startswith("{")][-1]
    return last["choices"][0] if "choices" in last else last


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


async def test_a_rollout_frozen_between_prompt_and_first_token_has_kv_of_both_versions(
    start_rig: StartRig,
) -> None:
    rig = await start_rig(1)
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
