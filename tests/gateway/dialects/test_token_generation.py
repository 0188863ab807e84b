"""/inference/v1/generate over engines that lack the route: said in the words of /v1/completions."""

from typing import Any

import pytest

from engines.types import EngineKind, ReplicaInfo
from gateway.dialects.token_generation import completion_body
from tests.rigs.rig import MAX_MODEL_LEN, Json, Rig

PATH = "/inference/v1/generate"
INFO = ReplicaInfo(
    replica_id="engine-0",
    incarnation="1",
    group="engine",
    kind=EngineKind.SGLANG,
    url="",
    model="m",
    world_size=1,
    max_model_len=100,
    max_num_seqs=8,
    engine_version="0.5.23",
)


def ask(**sampling: Any) -> Json:
    return {"token_ids": [5, 6, 7], "sampling_params": sampling}


async def test_logprobs_have_ids_and_the_token_itself_first(rig: Rig) -> None:
    _, reply = await rig.post(PATH, ask(max_tokens=4, logprobs=2, ignore_eos=True))
    choice = reply["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    for entry in content:
        assert entry["top_logprobs"][0] == {"token_id": entry["token_id"], "logprob": entry["logprob"], "rank": None}
        assert len(entry["top_logprobs"]) >= 2


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": [1, "2"]}, "token_ids"),
        ({"token_ids": [5] * MAX_MODEL_LEN}, "token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"n": 0}}, "n"),
        ({"sampling_params": {"max_tokens": "x"}}, "max_tokens"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "extra_args"),
        ({"sampling_params": {"logprobs": 1}, "output_mode": "text"}, "output_mode"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"request_id": 7}, "request_id"),
        ({"request_id": "a" * 257}, "request_id"),
    ],
)
async def test_bad_requests_name_the_field(rig: Rig, change: Json, param: str) -> None:
    status, reply = await rig.post(PATH, ask() | change)
    assert (status, reply["error"]["param"]) == (400, param)
    assert [replica.load_samples for replica in rig.fleet.replicas] == [0, 0]


async def test_rendering_needs_an_engine_that_does_it(rig: Rig) -> None:
    status, reply = await rig.post("/v1/completions/render", {"prompt": "a"})
    assert status == 404
    assert "engine-0 sim 0.32.0+sim" in reply["error"]["message"]


def test_defaults_are_not_left_to_a_models_generation_config() -> None:
    body = completion_body(ask(top_p=0.5) | {"model": "m", "user": "u"}, INFO)
    assert body["max_tokens"] == 97
    assert (body["temperature"], body["top_p"], body["model"]) == (1.0, 0.5, "m")
    assert "user" not in body
