"""A load in exchange for the weights before: it leaves what any load leaves, and is taken back bit by bit."""

from collections.abc import Iterable

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import Parameter

from engines.loading import planned_load
from engines.loading.exchange import Exchange
from engines.loading.planned_load import PlannedLoad
from tests.engines.loading import test_planned_load
from tests.engines.loading.test_planned_load import WIDTH, Tensors


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class PlayedModel(test_planned_load.PlayedModel):
    """Beside those of a planned load, weights that are shared by two names, and held twice."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = parameter(5, 3, dtype=torch.bfloat16)
        self.first, self.second = parameter(2, 2), parameter(2, 2)
        self.tied = parameter(4, 2)
        self.scale = parameter()
        for held in self.parameters():
            held.data.copy_(torch.randn(held.shape))
        self.vocabulary.data[5:] = float("nan")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:  # type: ignore[override]
        for name, tensor in weights:
            match name:
                case "odd" | "scale":
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
                case _:
                    super().load_weights([(name, tensor)])


def sent() -> Tensors:
    """Tensors of an update. In bits, since a NaN differs from itself."""
    tied = torch.randn(4, 2)
    return test_planned_load.sent() | {
        "odd": torch.randn(5, 3).to(torch.bfloat16),
        "experts": torch.randn(2, WIDTH, 4),
        "both": torch.randn(2, 2),
        "embedding": tied,
        "head": tied.clone(),
        "scale": torch.randn(()),
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
    other.load_state_dict(model.state_dict())
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
    assert planned.exchange({"odd": sent()["odd"]}.items()) is not None
    assert planned.exchange({"small": sent()["small"]}.items()) is None
