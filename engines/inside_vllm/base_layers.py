"""Loads a LoRA-enabled model under its checkpoint's names.

vLLM puts a wrapper around each layer that an adapter may change, and the layer's tensors get the wrapper's name.
Loaders then skip experts without an error (0.32). A layer in the place of its wrapper is loaded as it was at the
engine's start: the wrapper derives nothing from the layer.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from engines.loading.planned_load import Load
from engines.transfer.packing import NamedTensor

_PREFIX = "lora_base_layer_prefix"
"""Attribute of experts: the prefix of `w13_weight` in their names in a LoRA-enabled model."""


@contextmanager
def base_layers(model: Any) -> Iterator[None]:
    """Replace each LoRA wrapper in `model` by its layer, inside the block."""
    from vllm.lora.layers.base import BaseLayerWithLoRA

    modules = list(model.modules())
    wrapped = [
        (parent, name, child)
        for parent in modules
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    prefixed = [(module, vars(module)[_PREFIX]) for module in modules if vars(module).get(_PREFIX)]
    try:
        for parent, name, wrapper in wrapped:
            parent._modules[name] = wrapper.base_layer
        for module, _ in prefixed:
            setattr(module, _PREFIX, "")
        yield
    finally:
        for parent, name, wrapper in wrapped:
            parent._modules[name] = wrapper
        for module, prefix in prefixed:
            setattr(module, _PREFIX, prefix)


def loader_of(model: Any) -> Load:
    """Return the loader of a LoRA-enabled model, for the checkpoint's names."""
    return partial(_load, model)


def _load(model: Any, tensors: Iterable[NamedTensor]) -> Any:
    with base_layers(model):
        return type(model).load_weights(model, tensors)
