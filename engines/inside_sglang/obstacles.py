"""Finds what keeps an SGLang worker from loading weights into its parameters as the loaders of its model do."""

from typing import Any

SPECULATION = {"NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE"}
"""Methods whose draft has no weights, weights of its own, or the target's parameters themselves: a load in place into
the target leaves none of them wrong."""


def obstacle_to_updates(manager: Any) -> str:
    """Return why this worker's server takes no updates from us; "" where it takes them.

    SGLang's own routes may take them: they pack and quantize again.
    """
    runner = manager.tp_worker.model_runner
    settings = runner.server_args
    if settings.pp_size > 1 or settings.dp_size > 1:
        return "pipeline or data parallelism: SGLang numbers its workers by tensor-parallel rank alone"
    if manager.draft_worker is not None and settings.speculative_algorithm not in SPECULATION:
        return f"speculative decoding with {settings.speculative_algorithm}: it was not checked what its draft shares"
    if runner.model_config.quantization:
        return f"quantization {runner.model_config.quantization}: the engine computes with other tensors than it loads"
    for name in ("enable_lora", "enable_eplb", "torchao_config", "cpu_offload_gb"):
        if getattr(settings, name, None):
            return f"{name}: the engine keeps its weights elsewhere than its loaders write"
    if getattr(settings, "weight_cache_mode", "off") != "off":
        return "weight_cache_mode: the weights are shared with other servers"
    return obstacle_in_model(runner.model)


def obstacle_in_model(model: Any) -> str:
    """Return why `model` computes with other tensors than its loaders write; "" where it does not."""
    import torch

    if torch.version.hip is not None:
        return "SGLang rearranges weights on ROCm"
    if hasattr(model, "post_load_weights"):
        return f"{type(model).__name__} derives tensors from its weights when it has loaded them"
    found = ((name, _obstacle_in(module)) for name, module in model.named_modules())
    return next((f"{name}: {reason}" for name, reason in found if reason), "")


def _obstacle_in(module: Any) -> str:
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedFusedMoEMethod,
        UnquantizedLinearMethod,
    )

    if getattr(module, "_derived_weight_cache_error", None) is not None:
        return "it derives tensors from its weights"
    if getattr(module, "use_intel_amx_backend", False):
        return "its weights are packed for AMX"
    method = getattr(module, "quant_method", None)
    if method is None or type(method) in (UnquantizedEmbeddingMethod, UnquantizedLinearMethod):
        return ""
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return f"its method is {type(method).__name__}"
    for name in ("use_flashinfer_trtllm_moe", "w13_swiglu_interleaved"):
        if getattr(method, name, False):
            return f"experts whose rows are permuted ({name})"
    return ""
