"""Ways to train: which one is taken, and what each saves."""

import dataclasses

import pytest

from tests.tuning.plan.published import TRAINED, work
from tuning.plan.gpu import GPUS
from tuning.plan.shape import shape_of
from tuning.plan.trainer import Offload, Training, cheapest_training

H100 = GPUS["H100"]
DENSE = shape_of(TRAINED["Qwen2-7B"], "Qwen2-7B")
MIXTURE = shape_of(TRAINED["Qwen3-30B-A3B"], "Qwen3-30B-A3B")
SHORT = work(512, 1536)


def taken(**given: object) -> str:
    defaults = {"shape": DENSE, "gpu": H100, "gpus": 4, "work": SHORT}
    return str(cheapest_training(**(defaults | given)))  # type: ignore[arg-type]


def test_nothing_is_given_up_where_everything_fits() -> None:
    assert taken() == "plain"


def test_long_sequences_have_chunked_logits_first_and_then_several_gpus() -> None:
    assert taken(work=work(1024, 40_000)) == "chunked logits"
    assert taken(work=work(1024, 120_000)) == "SP 2, chunked logits"


def test_a_state_that_does_not_fit_leaves_its_optimizer_on_the_host_and_then_all() -> None:
    assert taken(shape=MIXTURE, gpus=4) == "offload optimizer"
    assert taken(shape=MIXTURE, gpus=1) == "offload all"
    assert taken(shape=MIXTURE, gpus=8) == "plain"


def test_adapters_need_no_optimizer_for_the_rest() -> None:
    assert taken(gpus=1) == "offload optimizer"
    assert taken(gpus=1, lora_rank=32) == "LoRA 32"


def test_what_fits_in_no_way_is_none() -> None:
    assert taken(gpu=dataclasses.replace(H100, memory_gib=2)) == "None"


def test_state_is_sixteen_bytes_a_parameter_and_two_for_frozen_ones() -> None:
    full, lora = Training(shape=DENSE, gpus=4), Training(shape=DENSE, gpus=4, lora_rank=32)
    assert full.state_bytes == pytest.approx(16 * DENSE.parameters)
    assert lora.state_bytes == pytest.approx(2 * DENSE.parameters + 16 * lora.trained)
    # peft's own count for all linear layers of Qwen2-7B at rank 32
    assert lora.trained == pytest.approx(80_740_352, rel=0.001)


def test_chunked_logits_and_shared_sequences_take_less() -> None:
    plain = Training(shape=DENSE, gpus=4)
    chunked = dataclasses.replace(plain, chunked_logits=True)
    shared = dataclasses.replace(plain, sequence_parallel=2)
    assert chunked.gib(SHORT, 4) < plain.gib(SHORT, 4) - 4
    assert shared.gib(SHORT, 4) == pytest.approx(plain.gib(SHORT, 2))
    assert shared.groups == 2


def test_offload_costs_time() -> None:
    seconds = [
        Training(shape=DENSE, gpus=4, offload=offload).seconds(H100, SHORT, 0.4, 8)
        for offload in (Offload.NONE, Offload.OPTIMIZER, Offload.ALL)
    ]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == 3


def test_a_micro_batch_fits_and_one_more_does_not() -> None:
    for training in (Training(shape=DENSE, gpus=4), Training(shape=DENSE, gpus=4, chunked_logits=True)):
        most = training.largest_micro_batch(H100, SHORT)
        assert training.gib(SHORT, most) <= 0.92 * H100.memory_gib < training.gib(SHORT, most + 1)
