"""Ways to train: which one is taken, and what each saves."""

import dataclasses
from typing import Any

import pytest

from tests.tuning.plan.published import TRAINED, work
from tuning.plan.gpu import GPUS
from tuning.plan.shape import shape_of
from tuning.plan.trainer import Training, cheapest_training

H100 = GPUS["H100"]
DENSE = shape_of(TRAINED["Qwen2-7B"], "Qwen2-7B")
MIXTURE = shape_of(TRAINED["Qwen3-30B-A3B"], "Qwen3-30B-A3B")


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({}, "plain"),
        ({"work": work(1024, 40_000)}, "chunked logits"),
        ({"work": work(1024, 120_000)}, "SP 2, chunked logits"),
        ({"shape": MIXTURE, "gpus": 8}, "plain"),
        ({"shape": MIXTURE, "gpus": 4}, "offload optimizer"),
        ({"shape": MIXTURE, "gpus": 1}, "offload all"),
        ({"gpus": 1}, "offload optimizer"),
        ({"gpus": 1, "lora_rank": 32}, "LoRA 32"),
        ({"gpu": dataclasses.replace(H100, memory_gib=2)}, "None"),
    ],
)
def test_the_cheapest_way_that_fits_is_taken(given: dict[str, Any], way: str) -> None:
    defaults: dict[str, Any] = {"shape": DENSE, "gpu": H100, "gpus": 4, "work": work(512, 1536)}
    assert str(cheapest_training(**defaults | given)) == way


def test_state_is_sixteen_bytes_a_parameter_and_two_for_frozen_ones() -> None:
    full, lora = Training(shape=DENSE, gpus=4), Training(shape=DENSE, gpus=4, lora_rank=32)
    assert full.state_bytes == pytest.approx(16 * DENSE.parameters)
    assert lora.state_bytes == pytest.approx(2 * DENSE.parameters + 16 * lora.trained)
    # peft's own count for all linear layers of Qwen2-7B at rank 32
    assert lora.trained == pytest.approx(80_740_352, rel=0.001)
