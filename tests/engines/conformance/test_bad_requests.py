"""A wrong request gets the reason, and the engine keeps serving."""

import pytest

from tests.engines.conformance.subject import PROMPT, Json, Subject

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_prompt_that_is_too_long_is_refused_with_the_limit(engine: Subject) -> None:
    assert engine.info.max_model_len is not None
    words = await engine.refusal(prompt=[5] * (engine.info.max_model_len + 1))
    assert str(engine.info.max_model_len) in words or str(engine.info.max_model_len + 1) in words


@pytest.mark.parametrize("token_id", [2**30, -1], ids=["too large", "below zero"])
async def test_a_token_id_outside_the_vocabulary_is_refused(engine: Subject, token_id: int) -> None:
    words = await engine.refusal(prompt=[*PROMPT, token_id])
    assert str(token_id) in words or "token id" in words.lower()


async def test_an_empty_prompt_is_refused(engine: Subject) -> None:
    assert await engine.refusal(prompt=[])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0},
        {"temperature": "warm"},
        {"top_p": 7.0},
        {"n": 0},
        {"max_tokens": 0},
        {"min_tokens": 20},
        {"logprobs": -5},
    ],
    ids=lambda fields: " ".join(f"{name} {value}" for name, value in fields.items()),
)
async def test_a_bad_sampling_value_is_refused_by_name(engine: Subject, fields: Json) -> None:
    said = await engine.refusal(**fields)
    ((name, value),) = fields.items()
    # SGLang says min_new_tokens, and of a value of the wrong type the value alone.
    assert name in said or name.replace("_", "_new_") in said or f'"{value}"' in said
