"""A draft's own weights follow an update whose tensors they are in, and stay otherwise."""

from collections.abc import Iterable

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import Module, Parameter

from engines.loading.draft import Draft

Tensors = dict[str, torch.Tensor]


def filled(value: float, *shape: int) -> Parameter:
    return Parameter(torch.full(shape, value), requires_grad=False)


class Target(Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = filled(-1, 4, 2)
        self.layer = filled(-1, 2, 2)
        self.calls = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.calls += 1
        own = dict(self.named_parameters())
        found = {name: tensor for name, tensor in weights if name in own}
        for name, tensor in found.items():
            own[name].data.copy_(tensor)
        return set(found)


class MtpLayers(Module):
    """As vLLM's: it takes its own tensors and the embedding of the target out of a whole checkpoint."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.embedding = target.embedding
        self.both = filled(-1, 4, 2)
        self.norm = filled(-1, 2)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            match name:
                case "embedding":
                    self.embedding.data.copy_(tensor)
                case "mtp.gate" | "mtp.up":
                    self.both.data.narrow(0, 2 * (name == "mtp.up"), 2).copy_(tensor)
                case "mtp.norm":
                    self.norm.data.copy_(tensor)


OF_TARGET: Tensors = {"embedding": torch.ones(4, 2), "layer": torch.ones(2, 2)}
OF_DRAFT: Tensors = {"mtp.gate": torch.ones(2, 2), "mtp.up": torch.ones(2, 2), "mtp.norm": torch.ones(2)}


def test_a_method_without_weights_has_none_to_update() -> None:
    assert Draft("ngram").describe() == "ngram, without weights"


def test_a_draft_of_the_targets_checkpoint_follows_an_update_that_has_its_tensors() -> None:
    target = Target()
    layers = MtpLayers(target)
    draft = Draft("mtp", layers, target)
    assert draft.describe() == "mtp, updated where the trainer sends its tensors"
    load = draft.beside(target.load_weights)
    draft.begin()
    load(list(OF_TARGET.items()))
    assert (layers.both == -1).all()
    assert (layers.embedding == 1).all()  # a part of the target
    load(iter(OF_DRAFT.items()))
    assert all((tensor == 1).all() for tensor in (layers.both, layers.norm, target.layer))


def test_loads_planned_ahead_change_nothing_and_are_those_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target()
    layers = MtpLayers(target)
    draft = Draft("mtp", layers, target)
    sent = OF_TARGET | OF_DRAFT
    draft.plan([(name, tensor.shape, tensor.dtype) for name, tensor in sent.items()])
    assert (layers.both == -1).all()
    monkeypatch.delattr(MtpLayers, "load_weights")  # plans need no loader
    draft.begin()
    draft.beside(target.load_weights)(sent.items())
    assert (layers.both == 1).all()


def test_a_draft_of_another_checkpoint_gets_none_of_the_targets_tensors() -> None:
    target, other = Target(), Target()
    draft = Draft("draft_model", other, target, "its checkpoint is its own")
    draft.begin()
    draft.beside(target.load_weights)(OF_TARGET.items())
    assert other.calls == 0
    assert draft.describe() == "draft_model, frozen: its checkpoint is its own"


def test_a_draft_that_is_all_the_targets_is_loaded_with_it() -> None:
    target = Target()
    layers = Module()
    layers.register_parameter("embedding", target.embedding)
    assert Draft("eagle", layers, target).describe() == "eagle, whose weights are all the model's"
