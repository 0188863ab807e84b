"""What a death does to a completion is what the table of features says."""

import asyncio
from typing import Any

import pytest

from gateway.dialects.resumption import FEATURES, MARK, Outcome, inexact_fields
from tests.rigs.rig import Json, StartRig

LENGTH = 100
BODY: Json = {"model": "sim", "prompt": [5, 6], "max_tokens": LENGTH, "ignore_eos": True, "return_token_ids": True}
EXAMPLES: dict[str, Any] = {
    "temperature": 0.7, "max_tokens": LENGTH, "n": 2, "logprobs": 1, "user": "me", "seed": 3, "presence_penalty": 0.5,
    "repetition_penalty": 1.2, "bad_words": ["no"], "stop": ["never"], "response_format": {"type": "json_object"},
    "logits_processors": ["one"], "use_beam_search": True, "best_of": 2, "suffix": "end", "prompt_logprobs": 0,
}  # fmt: skip
"""A field of each feature with a value that asks for something."""


def outcome_of(field: str) -> Outcome:
    return next(feature.outcome for feature in FEATURES if field in feature.fields)


def test_there_is_an_example_of_each_feature() -> None:
    assert all(set(feature.fields) & EXAMPLES.keys() for feature in FEATURES)


@pytest.mark.parametrize(("field", "value"), EXAMPLES.items())
async def test_a_death_does_to_a_completion_what_the_table_says(start_rig: StartRig, field: str, value: Any) -> None:
    rig, n = await start_rig(2), EXAMPLES["n"] if field == "n" else 1
    task = asyncio.create_task(rig.post("/v1/completions", BODY | {field: value}))
    await rig.begun(n, tokens=40)
    dead = await rig.kill_loaded()
    [other] = [replica for replica in rig.replicas if replica is not dead]
    rig.hurry()
    status, reply = await task
    assert status == 200, reply
    outcome = outcome_of(field)
    for told in reply["choices"]:
        assert (len(told["token_ids"]), told["finish_reason"]) == (LENGTH, "length")
        assert told.get(MARK) == ([field] if outcome is Outcome.MARKED else None)
    if outcome is Outcome.RESTARTED:
        assert other.generated_tokens == LENGTH
    else:
        assert other.generated_tokens <= n * (LENGTH - 36)  # a chunk has 4 tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 80, "seed": 3}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 80, "seed": 3}}),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_each_dialect_has_the_mark(start_rig: StartRig, path: str, body: Json, is_stream: bool) -> None:
    rig = await start_rig(2)
    sampling = body.get("sampling_params", body)
    sampling["ignore_eos"] = True
    task = asyncio.create_task(rig.client.post(rig.url + path, json=body | {"stream": is_stream}))
    await rig.begun(1, tokens=40)
    await rig.kill_loaded()
    rig.hurry()
    async with await task as response:
        text = await response.text()
    continues = path != "/v1/chat/completions" or not is_stream
    assert ('"error"' in text, text.count('"resumed":["seed"]')) == (not continues, continues)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"n": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "logprobs": 1},
        {"stop_token_ids": [7], "min_tokens": 3, "logit_bias": {"5": 1.0}, "allowed_token_ids": [5, 6]},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "stop": [], "stop_strings": None},
        {"seed": 3, "temperature": 0.0},
        {"response_format": {"type": "text"}, "echo": False, "best_of": 1},
    ],
)
def test_a_completion_that_depends_on_its_tokens_alone_continues_exactly(asked: Json) -> None:
    assert inexact_fields({"prompt": [1], **asked}) == ()


def test_a_seed_is_exact_at_temperature_0_alone_since_vllm_draws_at_any_other() -> None:
    assert inexact_fields({"prompt": [1], "seed": 3, "temperature": 1e-6}) == ("seed",)
