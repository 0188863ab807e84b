"""A planned load leaves what the model's own loaders leave, and asks them where they do more than to copy."""

from collections.abc import Callable, Iterable

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import Module, Parameter

from engines.loading.planned_load import PlannedLoad

Tensors = dict[str, torch.Tensor]

WIDTH, SHARD = 6, 2
ROWS = 5


class PlayedModel(Module):
    """One shard of a model: a query and a key in one parameter, a row-parallel layer, a vocabulary with room behind it,
    a cast, a square layer that checkpoints hold transposed, two of four experts, and a name that nobody wants."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = Parameter(torch.full((4, WIDTH), -1.0), requires_grad=False)
        self.rows = Parameter(torch.full((3, WIDTH // SHARD), -1.0), requires_grad=False)
        self.flipped = Parameter(torch.full((WIDTH, 2), -1.0), requires_grad=False)
        self.vocabulary = Parameter(torch.full((ROWS + 3, 2), -1.0), requires_grad=False)
        self.small = Parameter(torch.full((3,), -1.0, dtype=torch.bfloat16), requires_grad=False)
        self.square = Parameter(torch.full((WIDTH, WIDTH), -1.0), requires_grad=False)
        self.experts = Parameter(torch.full((2, 4, WIDTH), -1.0), requires_grad=False)
        self.local_expert = torch.tensor([-1, 0, -1, 1])  # this rank has experts 1 and 3
        self.calls: list[list[str]] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        named = list(weights)
        self.calls.append([name for name, _ in named])
        halves = {}
        for name, tensor in named:
            match name:
                case "square":
                    self.square.data.copy_(tensor.t())
                case "gate.1" | "up.1" | "gate.2" | "up.2":
                    local = self.local_expert[int(name[-1])].item()
                    if local >= 0:
                        self.experts.data[local].narrow(0, 0 if "gate" in name else 2, 2).copy_(tensor)
                case "fused":
                    for expert, one in enumerate(tensor.transpose(1, 2).unbind()):
                        self.experts.data[expert].copy_(one)
                case "padded":
                    self.qk.data[2:].fill_(0)
                    self.qk.data[2:3].copy_(tensor)
                case "bits":
                    self.small.data.copy_(tensor.view(torch.int16))
                case "rebound":
                    self.small.data = self.small.data.flip(0)[:2] if tensor.is_meta else self.small.data
                    self.small.data[:2].copy_(tensor)
                case "first half" | "second half":
                    halves[name] = tensor
                    if len(halves) == 2:
                        self.qk.data.copy_(torch.cat([halves["first half"], halves["second half"]]))
                case "q" | "k":
                    self.qk.data.narrow(0, 0 if name == "q" else 2, 2).copy_(tensor)
                case "rows":
                    self.rows.data.copy_(tensor.narrow(1, WIDTH // SHARD, WIDTH // SHARD))
                case "flipped":
                    self.flipped.data.copy_(tensor.t())
                case "vocabulary":
                    self.vocabulary[:ROWS].data.copy_(tensor)
                    self.vocabulary[ROWS:].data.fill_(0)
                case "small":
                    self.small.data.copy_(tensor)
                case "rotary":
                    pass
                case "scaled":
                    self.small.data.copy_(tensor * 2)
                case "read":
                    self.small.data.fill_(tensor.sum().item())
                case "constant":
                    self.small.data.fill_(7)
                case "broadcast":
                    self.qk.data.copy_(tensor)
                case _:
                    raise KeyError(name)
        return {name for name, _ in named}


def sent() -> Tensors:
    return {
        "q": torch.randn(2, WIDTH),
        "k": torch.randn(2, WIDTH),
        "rows": torch.randn(3, WIDTH),
        "flipped": torch.randn(2, WIDTH),
        "vocabulary": torch.randn(ROWS, 2),
        "small": torch.randn(3),
        "rotary": torch.randn(4),
    }


def content(model: PlayedModel) -> Tensors:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def loaded(*updates: Tensors) -> Tensors:
    """The result of the loaders themselves."""
    model = PlayedModel()
    for tensors in updates:
        model.load_weights(tensors.items())
    return content(model)


def check_same(found: Tensors, expected: Tensors) -> None:
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture
def model() -> PlayedModel:
    return PlayedModel()


@pytest.fixture
def planned(model: PlayedModel) -> PlannedLoad:
    made = PlannedLoad(model)
    made.begin()
    return made


def test_the_first_load_and_the_next_leave_what_loaders_leave(model: PlayedModel, planned: PlannedLoad) -> None:
    for tensors in (sent(), sent()):
        planned.load(tensors.items())
        check_same(content(model), loaded(tensors))


@pytest.mark.parametrize(
    "tensors",
    [
        lambda: {"square": torch.randn(WIDTH, WIDTH)},
        lambda: {"fused": torch.randn(2, WIDTH, 4)},
        lambda: {name: torch.randn(2, WIDTH) for name in ("gate.1", "up.1", "gate.2")},
        lambda: {"padded": torch.randn(1, WIDTH)},
        lambda: {"bits": torch.randn(3).to(torch.bfloat16)},
        lambda: {"broadcast": torch.randn(WIDTH)},
        lambda: {"q": torch.randn(2, 2 * WIDTH)[:, ::2]},
        lambda: dict(zip("qk", torch.randn(4, WIDTH).split(2), strict=True)),
    ],
    ids=["transposed", "experts of one tensor", "other ranks'", "filled", "bits", "spread", "gaps", "one buffer"],
)
def test_whatever_a_loader_does_its_result_is_that_of_a_load(
    model: PlayedModel, planned: PlannedLoad, tensors: Callable[[], Tensors]
) -> None:
    for _ in range(2):
        one = tensors()
        planned.load(one.items())
        check_same(content(model), loaded(one))


def test_tensors_that_came_together_may_come_apart_and_in_another_order(
    model: PlayedModel, planned: PlannedLoad
) -> None:
    planned.load(sent().items())
    tensors = sent()
    for name in reversed(tensors):
        planned.load([(name, tensors[name])])
    check_same(content(model), loaded(tensors))
    assert len(model.calls) == 1


@pytest.mark.parametrize("name", ["scaled", "read", "constant"])
def test_a_loader_that_does_more_than_to_copy_is_asked_each_time(
    model: PlayedModel, planned: PlannedLoad, name: str
) -> None:
    for _ in range(2):
        tensors = sent()
        del tensors["small"]
        tensors[name] = torch.ones(3)
        planned.load(tensors.items())
        check_same(content(model), loaded(tensors))
    for tensors in (sent(), sent()):
        planned.load((tensors | {name: torch.ones(3)}).items())
    assert model.calls[-2:] == [["rotary", name]] * 2  # the others of a chunk are planned


def test_a_parameter_that_a_loader_binds_to_other_memory_stays_where_it_is(
    model: PlayedModel, planned: PlannedLoad
) -> None:
    place = model.small.data_ptr()
    planned.load([("rebound", torch.tensor([1.0, 2.0]))])
    assert model.small.data_ptr() == place
    assert model.small.tolist() == [1, 2, -1]


def test_tensors_that_a_loader_joins_are_given_to_it_together(model: PlayedModel, planned: PlannedLoad) -> None:
    for _ in range(2):
        tensors = {
            "first half": torch.randn(2, WIDTH),
            "q": torch.randn(2, WIDTH),
            "second half": torch.randn(2, WIDTH),
        }
        planned.load(tensors.items())
        check_same(
            content(model),
            loaded({"first half": tensors["first half"], "second half": tensors["second half"]}, {"q": tensors["q"]}),
        )


def test_a_parameter_that_lies_elsewhere_is_planned_anew(model: PlayedModel, planned: PlannedLoad) -> None:
    planned.load(sent().items())
    model.qk = Parameter(torch.zeros(4, WIDTH), requires_grad=False)
    planned.begin()
    tensors = sent()
    planned.load(tensors.items())
    check_same(content(model), loaded(tensors))


class Stashing(torch.nn.Module):
    """Its loader keeps a half until the other comes, and forgets it once both are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = Parameter(torch.zeros(4), requires_grad=False)
        self.kept: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.kept[name] = tensor
            if len(self.kept) == 2:
                self.whole.data.copy_(torch.cat([self.kept["a"], self.kept["b"]]))
                self.kept.clear()


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_tensor_that_a_loader_keeps_for_its_partner_is_never_one_without_content(order: str) -> None:
    model = Stashing()
    planned = PlannedLoad(model)
    planned.begin()
    planned.plan((name, torch.Size([2]), torch.float32) for name in "ab")
    assert model.kept == {}
    sent = {"a": torch.ones(2), "b": torch.full((2,), 2.0)}
    for name in order:
        planned.load([(name, sent[name])])
    assert model.whole.tolist() == [1, 1, 2, 2]
