"""Mends of vLLM's CPU build (0.32): reloads of mixtures of experts, and requests beside LoRA adapters."""

from typing import Any


def mend_experts() -> None:
    """Have each reload pack experts, once for each process.

    CPU kernels read packed weights, of the same shape. vLLM packs them when it makes the kernel. A reload keeps the
    kernel and does not pack: the engine then computes with bytes in the wrong places, while every digest is right.
    """
    from vllm import __version__
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    if __version__.startswith("0.32.") and not hasattr(Method, "packs_again"):
        Method.process_weights_after_loading = _packing_again(Method.process_weights_after_loading)
        Method.packs_again = True


def _packing_again(process: Any) -> Any:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        kernel = self.moe_kernel
        process(self, layer)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)

    return process_weights_after_loading


def mend_adapters() -> None:
    """Have requests without an adapter computed without one, once for each process."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    if getattr(lora_ops.bgmv_shrink, "is_mended", False):
        return
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = _without_adapter_is_zero(lora_ops.bgmv_shrink)
    wrapper = punica_cpu.PunicaWrapperCPU
    wrapper.add_lora_logits = _sampled_rows_alone(wrapper.add_lora_logits)


def _without_adapter_is_zero(shrink: Any) -> Any:
    """Wrap a kernel so that rows without an adapter get zeros.

    vLLM marks such rows with -1, which torch reads as the index of the last adapter: the base model would then give the
    tokens of that adapter.
    """

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, adapters: Any, *args: Any, **kwargs: Any) -> None:
        shrink(inputs, weights, output, adapters, *args, **kwargs)
        output[: len(adapters)][adapters < 0] = 0

    bgmv_shrink.is_mended = True  # type: ignore[attr-defined]
    return bgmv_shrink


def _sampled_rows_alone(add: Any) -> Any:
    """Wrap a method so that only rows that are sampled from get an adapter's logits.

    vLLM looks adapters up by these rows. A prompt's logits have other rows, and equally many only by chance: without
    this, log-probabilities of a prompt beside other requests end the engine. On GPUs they pass unchanged too.
    """

    def add_lora_logits(self: Any, y: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        if x.numel() // x.shape[-1] == self.sampler_indices.shape[0]:
            add(self, y, x, *args, **kwargs)

    return add_lora_logits
