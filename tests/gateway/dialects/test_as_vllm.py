"""Requests that vLLM accepts are accepted, and mean the same."""

import asyncio

import pytest

from sim.model import detokenize
from tests.rigs.rig import Json, Rig, StartRig

COMPLETION: Json = {"model": "sim", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
CHAT: Json = {"model": "sim", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": None},
        {"n": "1"},
        {"max_tokens": "4"},
        {"max_tokens": 4.0},
        {"temperature": "0.5"},
        {"stream_options": {}},
        {"prompt_embeds": None},
        {"model": ""},
    ],
)
async def test_what_vllm_accepts_is_accepted(rig: Rig, fields: Json) -> None:
    status, reply = await rig.post("/v1/completions", COMPLETION | fields)
    assert (status, reply["usage"]["completion_tokens"]) == (200, 4)
    if "prompt_embeds" not in fields:
        assert (await rig.post("/v1/chat/completions", CHAT | fields))[0] == 200


@pytest.mark.parametrize("fields", [{"n": []}, {"n": "x"}, {"temperature": {}}, {"max_tokens": 1.5}, {"top_p": True}])
async def test_a_value_that_is_no_number_is_refused_with_its_field(rig: Rig, fields: Json) -> None:
    status, reply = await rig.post("/v1/completions", COMPLETION | fields)
    assert (status, reply["error"]["param"]) == (400, next(iter(fields)))


LIMITLESS: list[Json] = [{"max_tokens": None}, {"max_completion_tokens": 80}]
WITHOUT_LIMIT = {key: value for key, value in COMPLETION.items() if key != "max_tokens"}


@pytest.mark.parametrize("limit", LIMITLESS)
@pytest.mark.parametrize("is_cut_off", [False, True])
async def test_a_completion_without_max_tokens_has_vllms_16_after_a_death_too(
    start_rig: StartRig, limit: Json, *, is_cut_off: bool
) -> None:
    rig = await start_rig(2)
    task = asyncio.create_task(rig.post("/v1/completions", WITHOUT_LIMIT | limit))
    if is_cut_off:
        await rig.begun()
        await rig.kill_loaded()
        rig.hurry()
    status, reply = await task
    assert (status, reply["usage"]["completion_tokens"]) == (200, 16)


async def test_echo_repeats_the_prompt(rig: Rig) -> None:
    prompt = detokenize([5, 6, 7])
    _, plain = await rig.post("/v1/completions", COMPLETION | {"temperature": 0})
    _, echoed = await rig.post("/v1/completions", COMPLETION | {"temperature": 0, "echo": True})
    assert echoed["choices"][0]["text"] == prompt + plain["choices"][0]["text"]
    status, scored = await rig.post("/v1/completions", COMPLETION | {"max_tokens": 0, "echo": True})
    assert (status, scored["choices"][0]["text"]) == (200, prompt)


async def test_echo_repeats_the_prompt_in_a_stream(rig: Rig) -> None:
    chunks = await rig.stream("/v1/completions", COMPLETION | {"echo": True})
    told = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert told.startswith(detokenize([5, 6, 7]))
