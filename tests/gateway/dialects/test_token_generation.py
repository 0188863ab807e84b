"""/inference/v1/generate: token ids in, token ids out."""

from dataclasses import replace
from typing import Any

import pytest

from tests.rigs.rig import MAX_MODEL_LEN, Json, Rig

PATH = "/inference/v1/generate"


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
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"request_id": 7}, "request_id"),
        ({"request_id": "a" * 257}, "request_id"),
    ],
)
async def test_bad_requests_name_the_field(rig: Rig, change: Json, param: str) -> None:
    status, reply = await rig.post(PATH, ask() | change)
    assert (status, reply["error"]["param"]) == (400, param)
    assert [replica.load_samples for replica in rig.fleet.replicas] == [0, 0]


async def test_an_engine_without_the_route_is_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for replica in rig.fleet.replicas:
        monkeypatch.setattr(replica, "info", replace(replica.info, capabilities=frozenset()))
    status, reply = await rig.post(PATH, ask())
    assert status == 404
    assert "is served by vLLM" in reply["error"]["message"]


async def test_rendering_needs_an_engine_that_does_it(rig: Rig) -> None:
    status, reply = await rig.post("/v1/completions/render", {"prompt": "a"})
    assert status == 404
    assert "engine-0 sim 0.32.0+sim" in reply["error"]["message"]
