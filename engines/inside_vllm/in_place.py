"""Loads an update in place into vLLM's weights, for models that compute with weights in the checkpoint's layout.

vLLM's layerwise reload keeps each layer's tensors until it has all, loads them into a new layer, processes that layer
(packs, quantizes) and copies the result to the addresses that its CUDA graphs read. Where there is nothing to process,
its loaders can write there directly: without the second copy, in a third of the CPU time, which bounds an update.
"""

from contextlib import nullcontext
from typing import Any

from engines.inside_vllm.base_layers import base_layers

DEVICES = {"cuda"}
"""Types of devices on which an unquantized layer is used as it was loaded. On CPU it is packed; ROCm was not tried."""
EXPERT_BACKENDS = {"TRITON", "BATCHED_TRITON"}
"""Kernels for experts that read the weights as they were loaded. The others swap halves, permute, pad or pack them."""


def obstacle(worker: Any) -> str:
    """Return why a load in place, in any parts and order, would differ from vLLM's reload; "" where it would not."""
    from vllm.platforms import current_platform

    config, device = worker.vllm_config, worker.device
    if device.type not in DEVICES or current_platform.is_rocm():
        return f"vLLM rearranges weights on {'rocm' if current_platform.is_rocm() else device.type}"
    if config.model_config.quantization:
        return f"quantization {config.model_config.quantization}: the engine computes with other tensors than it loads"
    model = worker.get_model()
    with base_layers(model) if config.lora_config is not None else nullcontext():
        if not all(parameter.device == device for parameter in model.parameters()):
            return f"some weights are not on {device}"
        found = ((name, _obstacle_in(module)) for name, module in model.named_modules())
        return next((f"{name}: {reason}" for name, reason in found if reason), "")


def load_in_place(engine: Any) -> None:
    """Make vLLM's weight transfer engine begin and finish its next update without a layerwise reload."""

    def start() -> None:
        """Do nothing: loaders write into the weights directly."""

    engine.start_weight_update, engine.finish_weight_update = start, lambda: load_layerwise(engine)


def load_layerwise(engine: Any) -> None:
    """Restore vLLM's layerwise reload. `engine` is None in a vLLM that was started without weight transfer."""
    for name in ("start_weight_update", "finish_weight_update") if engine is not None else ():
        vars(engine).pop(name, None)


def _obstacle_in(module: Any) -> str:
    """Return why a module rearranges its loaded tensors, or derives others from them; "" where it does neither."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    if isinstance(module, QuantizeMethodBase):
        return ""  # it is judged with the layer that uses it
    if isinstance(module, Attention):
        return _obstacle_in_attention(module)
    if hasattr(module, "process_weights_after_loading"):
        return "it processes its weights after loading"
    if getattr(module, "_fse_fuse_gate", False):
        return "the gates of routed and shared experts are joined once, at the first step"
    if reason := _obstacle_in_method(module):
        return reason
    return "" if _is_as_loaded(module) else "its tensors have another form than its loaders write"


def _obstacle_in_attention(module: Any) -> str:
    from vllm.v1.attention.backend import AttentionImpl

    # Attention's own part sets scales to the values they have; FlashInfer's part reads sinks, where a model has some.
    derives = type(module.impl).process_weights_after_loading is not AttentionImpl.process_weights_after_loading
    return "attention derives tensors" if derives and getattr(module.impl, "_sinks_source", module) is not None else ""


def _obstacle_in_method(module: Any) -> str:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(module, "quant_method", None)
    method = getattr(method, "old_quant_method", method)  # LoRA wraps the method of experts
    if not isinstance(method, QuantizeMethodBase) or type(method) in (
        UnquantizedLinearMethod,
        UnquantizedEmbeddingMethod,
    ):
        return ""
    if type(method) is not UnquantizedFusedMoEMethod:
        return f"{type(method).__name__} processes its weights after loading"
    if method.moe.moe_parallel_config.enable_eplb:
        return "experts are moved between ranks (enable_eplb)"
    backend = method.unquantized_backend.name
    return "" if backend in EXPERT_BACKENDS else f"the {backend} kernels of its experts read rearranged weights"


def _is_as_loaded(module: Any) -> bool:
    """Return True where the module's tensors have the shapes, strides and dtypes that its loaders wrote."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    loaded, _ = get_layerwise_info(module).restore_metadata
    unrecorded = {*SKIP_TENSORS, "bias"}
    held = {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if name in loaded or name not in unrecorded
    }
    return {name: _form(tensor) for name, tensor in loaded.items()} == {
        name: _form(tensor) for name, tensor in held.items()
    }


def _form(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
