"""Mends LoRA in vLLM's CPU build (0.32): what has no adapter is computed without one, alone and beside adapters."""

from typing import Any


def mend() -> None:
    """Put both mends in place, once for each process."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    if getattr(lora_ops.bgmv_shrink, "is_mended", False):
        return
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = _without_adapter_is_zero(lora_ops.bgmv_shrink)
    wrapper = punica_cpu.PunicaWrapperCPU
    wrapper.add_lora_logits = _sampled_rows_alone(wrapper.add_lora_logits)


def _without_adapter_is_zero(shrink: Any) -> Any:
    """vLLM marks rows without an adapter with -1, and torch takes that for the last adapter's place: where it is taken,
    the base model's tokens would be those of an adapter."""

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, adapters: Any, *args: Any, **kwargs: Any) -> None:
        shrink(inputs, weights, output, adapters, *args, **kwargs)
        output[: len(adapters)][adapters < 0] = 0

    bgmv_shrink.is_mended = True  # type: ignore[attr-defined]
    return bgmv_shrink


def _sampled_rows_alone(add: Any) -> Any:
    """vLLM looks adapters up by the rows that are sampled from. A prompt's logits have other rows, and as many only by
    chance: without this, log-probabilities of a prompt beside other requests end the engine. On GPUs they pass too."""

    def add_lora_logits(self: Any, y: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        if x.numel() // x.shape[-1] == self.sampler_indices.shape[0]:
            add(self, y, x, *args, **kwargs)

    return add_lora_logits
