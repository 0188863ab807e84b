"""SGLang's /generate in front of engines that speak vLLM's dialect."""

from itertools import pairwise
from typing import Any

import orjson
import pytest

from gateway.dialects.sglang import answer, read_asked
from tests.rigs.rig import Json, Rig, StartRig

IDS = [5, 6, 7]


async def generate(rig: Rig, **body: Any) -> Any:
    async with rig.client.post(rig.url + "/generate", json=body) as response:
        reply = await response.json()
        assert response.status == 200, reply
        return reply


async def test_one_prompt_is_answered_with_one_object(rig: Rig) -> None:
    reply = await generate(rig, input_ids=IDS, sampling_params={"max_new_tokens": 6, "ignore_eos": True}, rid="mine")
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 6
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 3, 6)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["weight_version"], meta["weight_versions"]) == ("0", [{"version": 0, "start": 0, "end": 6}])
    assert "output_token_logprobs" not in meta


async def test_it_says_what_completions_say(rig: Rig) -> None:
    sampling = {"max_new_tokens": 8, "sampling_seed": 3, "temperature": 0.7, "n": 2}
    replies = await generate(rig, input_ids=IDS, sampling_params=sampling, return_logprob=True, top_logprobs_num=2)
    completed = await rig.complete(
        IDS, max_tokens=8, seed=3, temperature=0.7, n=2, logprobs=2, return_tokens_as_token_ids=True
    )
    for reply, choice in zip(replies, completed["choices"], strict=True):
        logprobs = choice["logprobs"]["token_logprobs"]
        told = reply["meta_info"]["output_token_logprobs"]
        assert (reply["text"], reply["output_ids"]) == (choice["text"], choice["token_ids"])
        assert told == [[value, i, None] for value, i in zip(logprobs, choice["token_ids"], strict=True)]
        assert [len(top) for top in reply["meta_info"]["output_top_logprobs"]] == [2] * len(logprobs)
        assert reply["meta_info"]["input_token_logprobs"] == []


async def test_a_stop_names_the_token_or_the_text_that_matched(rig: Rig) -> None:
    long = {"max_new_tokens": 60, "sampling_seed": 3}
    free = await generate(rig, input_ids=IDS, sampling_params=long)
    end = free["text"][10]
    cut = await generate(rig, input_ids=IDS, sampling_params=long | {"stop": [end], "no_stop_trim": True})
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert cut["text"] == free["text"][: free["text"].index(end) + 1]
    by_id = await generate(rig, input_ids=IDS, sampling_params=long | {"stop_token_ids": [free["output_ids"][4]]})
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": free["output_ids"][4]}


async def test_a_prompt_is_scored_from_the_token_asked_for(rig: Rig) -> None:
    asked = {"input_ids": IDS, "return_logprob": True, "top_logprobs_num": 1, "return_prompt_token_ids": True}
    reply = await generate(rig, **asked, logprob_start_len=0, sampling_params={"max_new_tokens": 0})
    meta = reply["meta_info"]
    scored = meta["input_token_logprobs"]
    assert [entry[1] for entry in scored] == IDS
    assert scored[0][0] is None
    assert all(value < 0 for value, _, _ in scored[1:])
    assert (meta["input_top_logprobs"][0], len(meta["input_top_logprobs"][1])) == (None, 1)
    assert (reply["text"], reply["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["output_token_logprobs"] == []
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert reply["prompt_token_ids"] == IDS
    later = await generate(rig, **asked, logprob_start_len=2)
    assert later["meta_info"]["input_token_logprobs"] == scored[2:]


def test_a_candidate_that_a_grammar_rules_out_is_the_least_likely() -> None:
    asked = read_asked({"input_ids": IDS, "return_logprob": True, "top_logprobs_num": 3}, "r")
    candidates = {"token_id:7": None, "token_id:8": -2.0, "token_id:9": -0.5}
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [candidates]}
    choice = {"text": "a", "token_ids": [9], "finish_reason": "length", "weight_version": 0, "logprobs": logprobs}
    tops = answer(asked, choice, None, 0.0)["meta_info"]["output_top_logprobs"]
    assert tops == [[[-0.5, 9, None], [-2.0, 8, None], [None, 7, None]]]


async def test_chunks_of_a_stream_tell_the_sample_from_its_start(start_rig: StartRig) -> None:
    rig = await start_rig(num_replicas=1, sim={"decode_step_s": 0.01})
    asked = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 9, "sampling_seed": 1, "ignore_eos": True}}
    whole = await generate(rig, **asked, return_logprob=True)
    chunks = await rig.stream("/generate", asked | {"return_logprob": True})
    assert len(chunks) > 1
    for before, after in pairwise(chunks):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert chunks[0]["meta_info"]["finish_reason"] is None
    last, meta = chunks[-1], chunks[-1]["meta_info"]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert meta["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]
    assert meta["weight_versions"] == [{"version": 0, "start": 0, "end": 9}]


async def test_a_streamed_group_says_which_sample_a_chunk_is_of(rig: Rig) -> None:
    sampling = {"max_new_tokens": 5, "n": 2, "ignore_eos": True}
    chunks = await rig.stream("/generate", {"input_ids": IDS, "sampling_params": sampling})
    last = {chunk["index"]: chunk for chunk in chunks}
    assert {index: len(chunk["output_ids"]) for index, chunk in last.items()} == {0: 5, 1: 5}


async def test_what_trainers_send_by_habit_changes_nothing(rig: Rig) -> None:
    habits: dict[str, object] = {
        "image_data": None, "return_hidden_states": False, "lora_path": "", "logprob_start_len": -1,
        "return_routed_experts": False, "log_metrics": True, "modalities": [],
    }  # fmt: skip
    sampling = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 3, "stop": None, "stop_token_ids": None,
        "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False, "regex": None,
        "custom_params": None,
    }  # fmt: skip
    assert await generate(rig, input_ids=IDS, sampling_params=sampling, **habits)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"text": "ab"}, "input_ids"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[5], [6]]}, "input_ids"),
        ({"rid": "a" * 257}, "rid"),
        ({"sampling_params": "hot"}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_tokens"),
        ({"sampling_params": {"max_new_tokens": None}}, "max_new_tokens"),
        ({"sampling_params": {"custom_params": {"a": 1}}}, "custom_params"),
        ({"sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"image_data": ["http://a"]}, "image_data"),
        ({"top_logprobs_num": "2"}, "top_logprobs_num"),
        ({"return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len"),
    ],
)
async def test_what_cannot_be_said_is_refused_by_name(rig: Rig, change: Json, param: str) -> None:
    status, reply = await rig.post("/generate", {"input_ids": IDS} | change)
    assert (status, reply["error"]["param"]) == (400, param)
    assert [replica.placed for replica in rig.fleet.replicas] == [0, 0]


async def test_health_generate_makes_a_token(start_rig: StartRig) -> None:
    rig = await start_rig(num_replicas=1)
    async with rig.client.get(rig.url + "/health_generate") as response:
        assert response.status == 200
    assert rig.fleet.replicas[0].placed == 1


async def test_what_a_stream_repeats_grows_with_its_length_and_not_with_the_square(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.rigs.rig.MAX_MODEL_LEN", 4096)
    rig, length = await start_rig(1), 2400
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": length, "ignore_eos": True}, "stream": True}
    async with rig.client.post(rig.url + "/generate", json=body | {"return_logprob": True}) as response:
        lines = [line[6:] async for line in response.content if line.startswith(b"data: {")]
    chunks = [orjson.loads(line) for line in lines]
    assert len(chunks[-1]["output_ids"]) == len(chunks[-1]["meta_info"]["output_token_logprobs"]) == length
    assert all(after["output_ids"][: len(told["output_ids"])] == told["output_ids"] for told, after in pairwise(chunks))
    assert sum(len(chunk["output_ids"]) for chunk in chunks) < 40 * length  # 600 chunks: 300 * length


async def test_an_adapter_is_named_by_its_path(rig: Rig) -> None:
    status, reply = await rig.post("/generate", {"input_ids": IDS, "lora_path": "adapter"})
    assert (status, reply["error"]["param"]) == (404, "model")
    assert "'adapter'" in reply["error"]["message"]
