"""Mends LoRA in vLLM's CPU build, where log-probabilities of a prompt beside other requests end the engine (0.32)."""

from typing import Any


def spare_prompt_logits() -> None:
    """Let a prompt's logits pass without an adapter's share in the head, as they do on GPUs.

    vLLM looks adapters up by the rows that are sampled from; a prompt has other rows, and as many only by chance.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    add = PunicaWrapperCPU.add_lora_logits
    if getattr(add, "spares_prompts", False):
        return

    def add_to_sampled(self: Any, y: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        if x.numel() // x.shape[-1] == self.sampler_indices.shape[0]:
            add(self, y, x, *args, **kwargs)

    add_to_sampled.spares_prompts = True  # type: ignore[attr-defined]
    PunicaWrapperCPU.add_lora_logits = add_to_sampled
