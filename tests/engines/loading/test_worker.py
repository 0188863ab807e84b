"""What the updates of one worker do to a draft."""

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import Module, Parameter

from engines.loading.worker import draft_of


class Model(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(2), requires_grad=False)


def test_a_draft_is_told_by_whose_weights_it_has() -> None:
    model, other = Model(), Model()
    assert draft_of("ngram", None, model) == "ngram, without weights"
    assert draft_of("eagle", torch.nn.ModuleList([model]), model) == "eagle, whose weights are all the model's"
    assert draft_of("mtp", other, model) == "mtp, frozen: no update has its tensors"
