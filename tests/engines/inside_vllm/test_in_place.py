"""Which models are loaded where their weights lie. `test_worker.py` has updates of a real vLLM, loaded so and not."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import Module, Parameter

from engines.inside_vllm import in_place as vllm_in_place
from engines.inside_vllm.in_place import obstacle


def held(*shape: int) -> Parameter:
    return Parameter(torch.zeros(shape), requires_grad=False)


def layer(method: Any = None) -> Module:
    made = Module()
    made.weight, made.scale = held(2, 3), held(3)
    if method is not None:
        made.quant_method = method
    return made


def attention(impl: type) -> Module:
    from vllm.model_executor.layers.attention import Attention

    made = Attention.__new__(Attention)
    Module.__init__(made)
    made.impl = object.__new__(impl)
    return made


def packed() -> Module:
    """As a layer that computes with what its method makes of its tensors."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    return layer(type("Packing", (UnquantizedLinearMethod,), {})())


def model(*layers: Module) -> Module:
    """A model of these layers and plain layers, loaded and known to vLLM."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    made = Module()
    every = *layers, layer(UnquantizedEmbeddingMethod()), layer(UnquantizedLinearMethod()), layer()
    made.layers = torch.nn.ModuleList(every)
    record_metadata_for_reloading(made)
    return made


def worker(loaded: Module) -> Any:
    """As much of vLLM's as tells what its model computes with."""
    config = SimpleNamespace(lora_config=None, model_config=SimpleNamespace(quantization=None))
    return SimpleNamespace(device=torch.device("cpu"), vllm_config=config, get_model=lambda: loaded)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM uses unquantized layers there as they were loaded."""
    monkeypatch.setattr(vllm_in_place, "DEVICES", {"cpu"})


def test_attention_that_derives_nothing_from_weights_is_and_any_other_is_not() -> None:
    from vllm.v1.attention.backend import AttentionImpl

    class Bare(AttentionImpl):
        def __init__(self) -> None: ...

        def forward(self) -> None: ...

    class Deriving(Bare):
        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            raise AssertionError

    class WithSinks(Deriving):
        _sinks_source: torch.Tensor | None = torch.zeros(1)

    class WithoutSinks(Deriving):
        _sinks_source = None

    told = {impl: not obstacle(worker(model(attention(impl)))) for impl in (Bare, Deriving, WithSinks, WithoutSinks)}
    assert told == {Bare: True, Deriving: False, WithSinks: False, WithoutSinks: True}


def changed(change: Callable[[Module], object]) -> Module:
    """A model of which a layer was changed after it was loaded."""
    odd = layer()
    loaded = model(odd)
    change(odd)
    return loaded


def as_weight(made: Callable[[Parameter], torch.Tensor]) -> Callable[[Module], object]:
    return lambda odd: setattr(odd, "weight", Parameter(made(odd.weight), requires_grad=False))


@pytest.mark.parametrize(
    ("made", "is_loaded_in_place"),
    [
        (model, True),
        (lambda: model(packed()), False),
        (lambda: changed(as_weight(lambda _: torch.zeros(3, 2))), False),
        (lambda: changed(as_weight(lambda _: torch.zeros(3, 2).t())), False),
        (lambda: changed(as_weight(lambda weight: weight.to(torch.bfloat16))), False),
        (lambda: changed(as_weight(lambda weight: weight.to("meta"))), False),
        (lambda: changed(lambda odd: delattr(odd, "scale")), False),
        (lambda: changed(lambda odd: setattr(odd, "workspace", held(4))), False),
        (lambda: changed(lambda odd: setattr(odd, "bias", held(2))), True),
    ],
    ids=["plain", "packed", "reshaped", "transposed", "cast", "elsewhere", "removed", "added", "a bias beside"],
)
def test_a_model_whose_tensors_are_what_loaders_write_is_loaded_in_place(
    made: Callable[[], Module], is_loaded_in_place: bool
) -> None:
    assert (not obstacle(worker(made()))) == is_loaded_in_place


def test_neither_a_quantized_model_is_nor_one_on_a_device_that_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    one = worker(model())
    one.vllm_config.model_config = SimpleNamespace(quantization="fp8")
    assert obstacle(one) == "quantization fp8: the engine computes with other tensors than it loads"
    monkeypatch.undo()
    assert obstacle(worker(model()))
