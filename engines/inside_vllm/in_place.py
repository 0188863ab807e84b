"""Loads an update into vLLM's weights where they lie, in models whose weights are used as checkpoints hold them.

vLLM's layerwise reload keeps each layer's tensors until it has all, loads them into a layer made anew, processes that
(packs, quantizes) and copies the result to where its CUDA graphs read. Where there is nothing to process, its loaders
may as well write there at once: no second copy, and a third of the CPU time, which is what an update waits for.
"""

from typing import Any

DEVICES = {"cuda"}
"""Types of devices on which an unquantized layer is used as it was loaded. On CPU it is packed; ROCm was not tried."""


def loads_in_place(worker: Any) -> bool:
    """Whether loading the worker's model again, in any parts and order, leaves what vLLM's own reload leaves."""
    from vllm.platforms import current_platform

    config = worker.vllm_config
    if worker.device.type not in DEVICES or current_platform.is_rocm():
        return False
    if config.lora_config is not None or config.model_config.quantization:
        return False
    model = worker.get_model()
    return all(parameter.device == worker.device for parameter in model.parameters()) and all(
        map(_is_plain, model.modules())
    )


def load_in_place(engine: Any) -> None:
    """Have vLLM's weight transfer engine begin and finish its next update without a reload around it."""

    def start() -> None:
        """Loaders write into the weights by themselves."""

    engine.start_weight_update, engine.finish_weight_update = start, lambda: load_layerwise(engine)


def load_layerwise(engine: Any) -> None:
    """As vLLM does unasked, from here on. `engine` is None in a vLLM that was started to receive nothing."""
    for name in ("start_weight_update", "finish_weight_update") if engine is not None else ():
        vars(engine).pop(name, None)


def _is_plain(module: Any) -> bool:
    """Whether a module computes with its tensors as its loaders write them, and nothing is derived from them."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.v1.attention.backend import AttentionImpl

    method = getattr(module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase) and type(method) not in (
        UnquantizedLinearMethod,
        UnquantizedEmbeddingMethod,
    ):
        return False
    if isinstance(module, Attention):
        # Its own part sets scales to what they are; FlashInfer's reads sinks, where a model has some.
        derives = type(module.impl).process_weights_after_loading is not AttentionImpl.process_weights_after_loading
        return not derives or getattr(module.impl, "_sinks_source", module) is None
    if hasattr(module, "process_weights_after_loading"):
        return False
    loaded, _ = get_layerwise_info(module).restore_metadata
    held = {name: one for name, one in module.named_parameters(recurse=False) if name in loaded or name != "bias"}
    return {name: _form(one) for name, one in loaded.items()} == {name: _form(one) for name, one in held.items()}


def _form(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
