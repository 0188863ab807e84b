"""A load in exchange for the weights before: it leaves what any load leaves, and is taken back bit by bit."""

from collections.abc import Iterable

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import Module, Parameter

from engines.loading import planned_load
from engines.loading.exchange import Exchange
from engines.loading.planned_load import PlannedLoad

Tensors = dict[str, torch.Tensor]

WIDTH = 6


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.randn(shape).to(dtype), requires_grad=False)


class PlayedModel(Module):
    """Weights as engines hold them: joined, cut, transposed, padded, cast, shared by two names, and held twice."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = parameter(4, WIDTH)
        self.rows = parameter(3, WIDTH // 2)
        self.flipped = parameter(WIDTH, 2)
        self.vocabulary = parameter(8, 2)
        self.vocabulary.data[5:] = float("nan")
        self.cast = parameter(3, dtype=torch.bfloat16)
        self.small = parameter(5, 3, dtype=torch.bfloat16)
        self.experts = parameter(2, 4, WIDTH)
        self.first, self.second = parameter(2, 2), parameter(2, 2)
        self.tied = parameter(4, 2)
        self.scale = parameter()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            match name:
                case "q" | "k":
                    self.qk.data.narrow(0, 0 if name == "q" else 2, 2).copy_(tensor)
                case "rows":
                    self.rows.data.copy_(tensor.narrow(1, WIDTH // 2, WIDTH // 2))
                case "flipped":
                    self.flipped.data.copy_(tensor.t())
                case "vocabulary":
                    self.vocabulary[:5].data.copy_(tensor)
                    self.vocabulary[5:].data.fill_(0)
                case "cast" | "small" | "scale":
                    getattr(self, name).data.copy_(tensor)
                case "experts":
                    for expert, one in enumerate(tensor.unbind()):
                        for half, part in enumerate(one.chunk(2, dim=-1)):
                            self.experts.data[expert].narrow(0, 2 * half, 2).copy_(part.t())
                case "both":
                    self.first.data.copy_(tensor)
                    self.second.data.copy_(tensor)
                case "embedding" | "head":
                    self.tied.data.copy_(tensor)
                case "one for all":
                    self.first.data.copy_(tensor.expand(2, 2))
                case "scaled":
                    self.cast.data.copy_(tensor * 2)
                case "elsewhere":
                    pass
                case _:
                    raise KeyError(name)


def sent() -> Tensors:
    """Tensors of an update. In bits, since a NaN differs from itself."""
    tied = torch.randn(4, 2)
    return {
        "q": torch.randn(2, WIDTH),
        "k": torch.randn(2, WIDTH),
        "rows": torch.randn(3, WIDTH),
        "flipped": torch.randn(2, WIDTH),
        "vocabulary": torch.randn(5, 2),
        "cast": torch.randn(3),
        "small": torch.randn(5, 3).to(torch.bfloat16),
        "experts": torch.randn(2, WIDTH, 4),
        "both": torch.randn(2, 2),
        "embedding": tied,
        "head": tied.clone(),
        "scale": torch.randn(()),
        "elsewhere": torch.randn(7),
    }


def bits(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for name, tensor in tensors
    }


@pytest.fixture
def model() -> PlayedModel:
    return PlayedModel()


@pytest.fixture
def planned(model: PlayedModel) -> PlannedLoad:
    made = PlannedLoad(model)
    made.begin()
    return made


def exchange_of(planned: PlannedLoad, tensors: Tensors) -> Exchange:
    found = planned.exchange(tensors.items())
    assert found is not None
    return found


@pytest.mark.parametrize("inference", [False, True])  # engines call their workers in either mode
def test_an_exchange_loads_what_any_load_does_and_is_taken_back_bit_by_bit(
    model: PlayedModel, planned: PlannedLoad, inference: bool
) -> None:
    before, other, tensors = bits(model.named_parameters()), PlayedModel(), sent()
    other.load_weights(tensors.items())
    with torch.inference_mode(inference):
        exchange = exchange_of(planned, tensors)
        exchange.load()
    assert bits(model.named_parameters()) == bits(other.named_parameters()) != before
    exchange.take_back()
    assert bits(model.named_parameters()) == before


def test_of_two_names_with_one_place_each_tensor_stays_as_it_was_sent(model: PlayedModel, planned: PlannedLoad) -> None:
    before = bits(model.named_parameters())
    tensors = {"embedding": torch.randn(4, 2), "head": torch.randn(4, 2)}
    were = bits(tensors.items())
    exchange = exchange_of(planned, tensors)
    exchange.load()
    assert torch.equal(model.tied, tensors["head"])
    assert bits(tensors.items()) == were
    exchange.take_back()
    assert bits(model.named_parameters()) == before


def test_there_is_no_exchange_where_a_loader_does_more_than_copy(model: PlayedModel, planned: PlannedLoad) -> None:
    before = bits(model.named_parameters())
    assert planned.exchange({**sent(), "scaled": torch.ones(3)}.items()) is None
    assert planned.exchange({"flipped": torch.randn(WIDTH, 2).t()}.items()) is None
    assert bits(model.named_parameters()) == before


def test_there_is_no_exchange_where_too_much_would_be_kept_aside(
    planned: PlannedLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_load, "ASIDE_BYTES", 5)
    assert planned.exchange({"small": sent()["small"]}.items()) is not None
    assert planned.exchange({"cast": sent()["cast"]}.items()) is None
