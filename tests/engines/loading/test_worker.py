"""The updates of one worker: which loads of received tensors keep the weights before."""

from collections.abc import Iterable

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import Module, Parameter

from engines.loading.planned_load import PlannedLoad
from engines.loading.worker import Target, draft_of

SENT = [("weight", torch.ones(2))]


class Model(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


def target(*, obstacle: str = "") -> Target:
    one = Target(device=torch.device("cpu"), weights=PlannedLoad(Model()), obstacle=obstacle)
    one.begin()
    return one


def test_a_load_in_place_keeps_the_weights_before() -> None:
    assert target().exchange(SENT) is not None


def test_a_model_that_its_engine_loads_does_not() -> None:
    quantized = target(obstacle="quantization fp8")
    assert quantized.exchange(SENT) is None
    assert quantized.has_moved


def test_a_draft_is_told_by_whose_weights_it_has() -> None:
    model, other = Model(), Model()
    assert draft_of("ngram", None, model) == "ngram, without weights"
    assert draft_of("eagle", torch.nn.ModuleList([model]), model) == "eagle, whose weights are all the model's"
    assert draft_of("mtp", other, model) == "mtp, frozen: no update has its tensors"
