"""The dialect of TRL up to 1.10: calls recorded from its own client, and the replies that this client reads."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rigs.rig import Json, Rig, StartRig

CALLS = json.loads((Path(__file__).parent / "trl_1_10_calls.json").read_text(encoding="utf-8"))["calls"]
GENERATE, WITH_IDS, WITHOUT_LOGPROBS, CHAT, BINARY, AS_JSON, RESET, CLOSE = CALLS


@pytest.fixture
async def legacy(start_rig: StartRig) -> Rig:
    return await start_rig(gateway={"trl_legacy": True})


async def made(rig: Rig, call: Json, **changes: Any) -> Any:
    status, reply = await rig.post(call["path"], call["body"] and call["body"] | changes)
    assert status == 200, reply
    return reply


async def test_texts_are_completed_prompt_by_prompt(legacy: Rig) -> None:
    reply = await made(legacy, GENERATE)
    asked = {key: GENERATE["body"][key] for key in ("n", "max_tokens", "temperature")} | {"seed": 3, "ignore_eos": True}
    direct = await legacy.complete(["ab", "cde"], **asked, top_k=0)
    assert reply["completion_ids"] == [choice["token_ids"] for choice in direct["choices"]]
    assert [len(ids) for ids in reply["prompt_ids"]] == [2, 3]
    assert [[len(top) for top in sequence] for sequence in reply["logprobs"]] == [[1] * 4] * 4
    assert reply["logprob_token_ids"] == [[[token] for token in ids] for ids in reply["completion_ids"]]


async def test_token_ids_come_back_with_the_likeliest_first_and_the_sampled_among_them(legacy: Rig) -> None:
    reply = await made(legacy, WITH_IDS)
    assert reply["prompt_ids"] == WITH_IDS["body"]["prompts"]
    for ids, values, ranked in zip(reply["completion_ids"], reply["logprobs"], reply["logprob_token_ids"], strict=True):
        for token, position, candidates in zip(ids, values, ranked, strict=True):
            assert position == sorted(position, reverse=True)
            assert token in candidates
            assert 2 <= len(candidates) <= 3


async def test_logprobs_are_null_where_none_were_asked_for(legacy: Rig) -> None:
    reply = await made(legacy, WITHOUT_LOGPROBS)
    assert (reply["logprobs"], reply["logprob_token_ids"]) == (None, None)
    assert len(reply["completion_ids"]) == 1


async def test_conversations_are_continued_in_their_order(legacy: Rig) -> None:
    reply = await made(legacy, CHAT)
    assert (len(reply["prompt_ids"]), len(reply["completion_ids"])) == (2, 4)
    alone = await made(legacy, CHAT, messages=CHAT["body"]["messages"][1:])
    assert alone["prompt_ids"] == reply["prompt_ids"][1:]
    assert alone["completion_ids"] == reply["completion_ids"][2:]
    for ids, ranked in zip(reply["completion_ids"], reply["logprob_token_ids"], strict=True):
        assert all(token in candidates for token, candidates in zip(ids, ranked, strict=True))


async def test_sequences_are_scored_from_their_prompts_end_on_in_both_formats(legacy: Rig) -> None:
    told, packed = await made(legacy, AS_JSON), await made(legacy, BINARY)
    assert packed["completion_lengths"] == [len(values) for values in told["logprobs"]] == [2, 3]
    shape = packed["shape"]
    assert shape == [2, 3, 3]

    def array(name: str, dtype: type, last: int) -> Any:
        return np.frombuffer(base64.b64decode(packed[name]), dtype=dtype).reshape(*shape[:2], last)

    for sequence, values in enumerate(told["logprobs"]):
        for position, ranked in enumerate(values):
            assert array("logprobs_b64", np.float32, 3)[sequence, position] == pytest.approx(ranked[:3], abs=1e-5)
            ids = told["logprob_token_ids"][sequence][position]
            assert array("token_ids_b64", np.int32, 3)[sequence, position].tolist() == ids[:3]
            actual = AS_JSON["body"]["sequences"][sequence][2 + position]
            assert array("actual_token_ids_b64", np.int32, 1)[sequence, position, 0] == actual
            assert array("actual_logprobs_b64", np.float32, 1)[sequence, position, 0] == pytest.approx(
                ranked[ids.index(actual)], abs=1e-5
            )
    assert array("logprobs_b64", np.float32, 3)[0, 2].tolist() == [-np.inf] * 3, "nothing was there"


async def test_the_cache_is_reset_and_the_end_of_a_client_harms_nothing(legacy: Rig) -> None:
    assert "True" in (await made(legacy, RESET))["message"]
    await made(legacy, CLOSE)
    assert (await legacy.get("/health/"))[1] == {"status": "ok"}
    assert (await legacy.get("/get_world_size/"))[1] == {"world_size": 2}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/init_communicator/", {"host": "0.0.0.0", "port": 51216, "world_size": 3}, "trl_legacy.install()"),
        ("/update_named_param/", {"name": "weight", "dtype": "torch.float32", "shape": [4, 4]}, "trl_legacy.install()"),
    ],
)
async def test_a_client_that_was_not_made_ready_to_sync_is_told_how(
    legacy: Rig, path: str, body: Json, told: str
) -> None:
    status, reply = await legacy.post(path, body)
    assert status == 409
    assert told in reply["error"]["message"]


@pytest.mark.parametrize(
    ("call", "change", "param"),
    [
        (GENERATE, {"images": [["aGVsbG8="], None]}, "images"),
        (GENERATE, {"images": 1}, "images"),
        (GENERATE, {"prompts": []}, "prompts"),
        (GENERATE, {"generation_kwargs": ["seed"]}, "generation_kwargs"),
        (CHAT, {"messages": [{"role": "user", "content": "flat"}]}, "messages"),
        (AS_JSON, {"prompt_lengths": [2]}, "prompt_lengths"),
        (AS_JSON, {"prompt_lengths": [2, 9]}, "prompt_lengths"),
        (AS_JSON, {"top_logprobs": 0}, "top_logprobs"),
        (AS_JSON, {"response_format": "pickle"}, "response_format"),
    ],
)
async def test_what_cannot_be_said_is_refused_by_name(legacy: Rig, call: Json, change: Json, param: str) -> None:
    status, reply = await legacy.post(call["path"], call["body"] | change)
    assert (status, reply["error"]["param"]) == (400, param)


async def test_prompts_of_one_call_are_spread_over_the_fleet(legacy: Rig) -> None:
    await asyncio.gather(made(legacy, WITH_IDS), made(legacy, AS_JSON))
    assert [replica.placed for replica in legacy.fleet.replicas] == [2, 2]


@pytest.mark.parametrize("call", [WITH_IDS, CHAT, AS_JSON], ids=lambda call: str(call["path"]))
async def test_tokens_count_against_the_limit_of_their_key(start_rig: StartRig, call: Json) -> None:
    limits = {"key_limits": {"tokens_per_minute": 1}}
    keys = {"trusted_networks": [], "inference_keys": ["reader"], "admin_keys": ["owner"]}
    rig = await start_rig(1, gateway={"trl_legacy": True} | limits | keys)
    headers = {"Authorization": "Bearer reader"}
    assert [(await rig.post(call["path"], call["body"], headers=headers))[0] for _ in range(2)] == [200, 429]


async def test_nothing_of_it_is_there_unless_switched_on(rig: Rig) -> None:
    assert (await rig.post("/generate/", GENERATE["body"]))[0] == 404
