"""Workloads are the same on every machine and ask for what a trainer asks for."""

from typing import Any

import pytest

from loadtests.workloads import LengthMix, Workload


def workload(**changes: Any) -> Workload:
    values: dict[str, Any] = {"prompts": 4, "samples": 2, "prompt_tokens": LengthMix.parse("16"), "max_tokens": 8}
    return Workload(**{**values, **changes})


def test_a_length_mix_keeps_to_its_weights() -> None:
    mix = LengthMix.parse("8*3,32*1")
    lengths = [len(prompt) for prompt in workload(prompts=400, prompt_tokens=mix).prompts_of("a")]
    assert set(lengths) == {8, 32}
    assert 250 < lengths.count(8) < 350
    assert str(mix) == "8*3,32*1"
    assert str(LengthMix.parse("256")) == "256"


@pytest.mark.parametrize("text", ["0", "8*0", "", "8,x"])
def test_a_length_mix_without_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        LengthMix.parse(text)
