"""Loads an update into vLLM's weights where they lie, in models whose weights are used as checkpoints hold them.

vLLM's layerwise reload keeps each layer's tensors until it has all, loads them into a new layer, processes that layer
(packs, quantizes) and copies the result to where its CUDA graphs read. Where there is nothing to process, its loaders
may as well write there at once: no second copy, and a third of the CPU time, which is what an update waits for.
"""

from contextlib import nullcontext
from typing import Any

from engines.inside_vllm.base_layers import base_layers

DEVICES = {"cuda"}
"""Types of devices on which an unquantized layer is used as it was loaded. On CPU it is packed; ROCm was not tried."""
EXPERT_BACKENDS = {"TRITON", "BATCHED_TRITON"}
"""Kernels for experts that read the weights as they were loaded. The others swap halves, permute, pad or pack them."""


def obstacle(worker: Any) -> str:
    """Why a load in place would not leave what vLLM's own reload leaves, in any parts and order; "" where it would."""
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
    """Have vLLM's weight transfer engine begin and finish its next update without a reload around it."""

    def start() -> None:
        """Loaders write into the weights by themselves."""

    engine.start_weight_update, engine.finish_weight_update = start, lambda: load_layerwise(engine)


def load_layerwise(engine: Any) -> None:
    """As vLLM does by default, from here on. `engine` is None in a vLLM that was started to receive nothing."""
    for name in ("start_weight_update", "finish_weight_update") if engine is not None else ():
        vars(engine).pop(name, None)


def _obstacle_in(module: Any) -> str:
    """Why a module does not compute with its tensors as its loaders write them, or derives others from them."""
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

    # Its own part sets scales to what they are; FlashInfer's reads sinks, where a model has some.
    derives = type(module.impl).process_weights_after_loading is not AttentionImpl.process_weights_after_loading
    return "attention derives tensors" if derives and getattr(module.impl, "_sinks_source", module) is not None else ""


def _obstacle_in_method(module: Any) -> str:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(module, "quant_method", None)
    method = getattr(method, "old_quant_method", method)  # LoRA puts another before that of experts
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
    """Whether its tensors have the forms that they had when its loaders wrote them."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    loaded, _ = get_layerwise_info(module).restore_metadata
    unrecorded = {*SKIP_TENSORS, "bias"}
    held = {
        name: one for name, one in module.named_parameters(recurse=False) if name in loaded or name not in unrecorded
    }
    return {name: _form(one) for name, one in loaded.items()} == {name: _form(one) for name, one in held.items()}


def _form(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
