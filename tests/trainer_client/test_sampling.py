"""Sampling parameters as they are sent, and parameters that are refused before anything is sent."""

from typing import Any

import pytest

from engines.errors import InvalidRequest
from trainer_client import SamplingParams


def test_the_defaults_are_sent_so_that_no_generation_config_takes_their_place() -> None:
    body = SamplingParams(n=4, max_tokens=32).body()
    assert body == {
        "n": 4,
        "max_tokens": 32,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
    }


def test_what_is_set_is_sent_and_extra_fields_pass() -> None:
    sampling = SamplingParams(seed=0, stop=("\n",), stop_token_ids=(2,), ignore_eos=True, min_tokens=3, logprobs=False)
    body = sampling.body()
    assert (body["seed"], body["stop"], body["stop_token_ids"]) == (0, ["\n"], [2])
    assert body["ignore_eos"]
    assert body["min_tokens"] == 3
    assert "logprobs" not in body
    assert SamplingParams(extra={"logit_bias": {"5": 1.0}}).body()["logit_bias"] == {"5": 1.0}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"stop": "END"}, "stop"),
        ({"extra": {"n": 3}}, "extra.n"),
        ({"extra": {"stream": True}}, "extra.stream"),
    ],
)
def test_a_wrong_parameter_is_refused_by_its_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**given)
    assert refused.value.param == param
    assert param.removeprefix("extra.") in str(refused.value)
