"""/v1/completions over a fleet: split by prompt, put together prompt-major, refused in the dialect's own form."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest

from engines.engine import Engine
from gateway.dialects.sampling import versioned_salt
from gateway.fleet.replica import Replica
from tests.rigs.calls import until
from tests.rigs.rig import MAX_MODEL_LEN, Json, Rig, StartRig

PROMPTS = [[10 + i, 20 + i, 30 + i] for i in range(6)]


async def test_choices_come_prompt_major_whatever_replica_made_them(rig: Rig) -> None:
    reply = await rig.complete(PROMPTS, n=3)
    assert [choice["index"] for choice in reply["choices"]] == list(range(18))
    assert [choice["prompt_token_ids"] for choice in reply["choices"][::3]] == PROMPTS


async def test_a_split_batch_equals_the_prompts_one_by_one(rig: Rig) -> None:
    together = await rig.complete(PROMPTS, temperature=0)
    alone = [await rig.complete([prompt], temperature=0) for prompt in PROMPTS]
    assert [c["token_ids"] for c in together["choices"]] == [r["choices"][0]["token_ids"] for r in alone]


async def test_logprobs_have_the_three_equal_lists_that_trl_zips(rig: Rig) -> None:
    reply = await rig.complete(PROMPTS[:1], logprobs=0, return_tokens_as_token_ids=True)
    logprobs, ids = reply["choices"][0]["logprobs"], reply["choices"][0]["token_ids"]
    assert logprobs["tokens"] == [f"token_id:{i}" for i in ids]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(ids)


def test_prompts_that_are_sent_under_updates_share_no_prefix() -> None:
    """Which version reads them is not known yet, and another update's is another."""

    def salt(version: int | None) -> str:
        return versioned_salt({}, cast(Replica, SimpleNamespace(weight_version=version)), None)

    assert salt(4) == salt(4) != salt(5)
    assert salt(None) != salt(None)


@pytest.mark.parametrize(
    ("change", "status", "param", "said"),
    [
        ({"prompt": [[1, 2], []]}, 400, "prompt", "prompt[1] is empty"),
        ({"prompt": ""}, 400, "prompt", "prompt[0] is empty"),
        ({"prompt": []}, 400, "prompt", "empty list"),
        ({"prompt": None}, 400, "prompt", "NoneType"),
        ({"prompt": [[5], {"a": 1}]}, 400, "prompt", "prompt[1] is a dict"),
        ({"prompt": [[5], [5] * MAX_MODEL_LEN]}, 400, "prompt", f"prompt[1] has {MAX_MODEL_LEN} tokens"),
        ({"model": "another"}, 404, "model", "'another' is not served here; there is sim"),
        ({"n": 2, "temperature": 0}, 400, "n", "temperature = 0"),
        ({"n": 0}, 400, "n", "n = 0"),
        ({"n": 10**9}, 400, "n", "between 1 and 1024"),
        ({"n": "two"}, 400, "n", "n = 'two'"),
        ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"prompt_embeds": "AAAA"}, 400, "prompt_embeds", "refused"),
    ],
)
async def test_a_bad_request_is_refused_with_field_value_and_remedy(
    rig: Rig, change: Json, status: int, param: str, said: str
) -> None:
    body = {"model": "sim", "prompt": [[1, 2]], **change}
    got, reply = await rig.post("/v1/completions", body)
    assert (got, reply["error"]["param"]) == (status, param)
    assert said in reply["error"]["message"]
    assert [replica.placed for replica in rig.fleet.replicas] == [0, 0]
    await rig.complete(PROMPTS)


async def test_an_engines_refusal_names_the_prompt_and_ends_the_others(rig: Rig) -> None:
    body = {"model": "sim", "prompt": [[5, 6], [5, -1]], "max_tokens": 100}
    status, reply = await rig.post("/v1/completions", body)
    assert status == 400
    assert reply["error"]["message"].startswith("prompt[1]: ")
    await until_idle(rig)


@pytest.mark.parametrize("content", [b"{not json", b"", b"[1, 2]"])
async def test_a_body_that_is_no_json_object_is_refused(rig: Rig, content: bytes) -> None:
    async with rig.client.post(rig.url + "/v1/completions", data=content) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "BadRequestError"
    await rig.complete(PROMPTS)


async def test_a_chunked_body_over_the_limit_is_refused_too(start_rig: StartRig) -> None:
    rig = await start_rig(gateway={"max_body_bytes": 1000})

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    async with rig.client.post(rig.url + "/v1/completions", data=chunks()) as response:
        assert response.status == 413


async def test_a_stream_brings_all_prompts_with_one_id_and_ends_with_done(rig: Rig) -> None:
    body = {"model": "sim", "prompt": PROMPTS[:3], "n": 2, "stream": True, "max_tokens": 9, "ignore_eos": True}
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    *chunks, usage = await rig.stream("/v1/completions", body)
    tokens: dict[int, list[int]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            tokens.setdefault(choice["index"], []).extend(choice["token_ids"] or [])
    assert {index: len(ids) for index, ids in tokens.items()} == dict.fromkeys(range(6), 9)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 54


async def test_an_error_before_the_first_chunk_keeps_its_status(rig: Rig) -> None:
    status, reply = await rig.post("/v1/completions", {"model": "sim", "prompt": [5, -1], "stream": True})
    assert (status, reply["error"]["code"]) == (400, 400)


async def test_a_client_that_leaves_frees_its_place(start_rig: StartRig) -> None:
    rig = await start_rig(gateway={"replay_grace_s": 0})
    body = {"model": "sim", "prompt": PROMPTS, "max_tokens": 100, "ignore_eos": True}
    asked = asyncio.create_task(rig.post("/v1/completions", body))
    await rig.begun()
    asked.cancel()
    await until_idle(rig)


async def until_idle(rig: Rig) -> None:
    await until(lambda: not any(replica.load_samples for replica in rig.fleet.replicas))


@pytest.mark.parametrize("form", [{}, {"stream": True}, {"prompt": [[5] * 5000, [5, 6]]}])
async def test_a_prompt_of_ids_that_engines_are_to_cut_is_not_refused_for_its_length(rig: Rig, form: Json) -> None:
    asked: list[Json] = []
    for reader in rig.readers.values():
        monitored(reader.engine, asked)
    body = {"prompt": [5] * 5000, "max_tokens": 2, "truncate_prompt_tokens": 20} | form
    async with rig.client.post(rig.url + "/v1/completions", json=body) as response:
        await response.read()
    assert {one["truncate_prompt_tokens"] for one in asked} == {20}
    status, _ = await rig.post("/v1/completions", {**body, "truncate_prompt_tokens": None, "stream": False})
    assert status == 400


def monitored(engine: Engine, asked: list[Json]) -> None:
    """Note the bodies that reach an engine, and give it the prompts as vLLM cuts them."""
    reply, events = engine.reply, engine.events

    def cut(body: Json) -> Json:
        asked.append(body)
        return body | {"prompt": body["prompt"][-20:]}

    engine.reply = lambda path, body, timeout_s: reply(path, cut(body), timeout_s)  # type: ignore[method-assign]
    engine.events = lambda path, body, timeout_s: events(path, cut(body), timeout_s)  # type: ignore[method-assign]
