"""Mends updates of mixtures of experts in vLLM's CPU build (0.32): a reload left experts as they were loaded.

Kernels there read packed weights, of the same shape. vLLM packs them when it makes the kernel, and a reload keeps the
kernel and so leaves that out: the engine then computes with bytes in the wrong places, and every digest is right.
"""

from typing import Any


def mend() -> None:
    """Have each reload pack experts, once for each process."""
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
